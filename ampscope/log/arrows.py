"""The Arrow sink: big batches in one file, rows not yet in one in a short tail file beside it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampscope.log import frames
from ampscope.log.buffer import RowBuffer
from ampscope.log.encode import Row, to_batch
from ampscope.log.files import AppendFile
from ampscope.log.lost import Lost
from ampscope.log.schema import HEADER_KEY, Header, buffers_a_column, make_schema

TAIL_BATCHES = 64
"""Batches after which the tail is begun anew as one batch, so that a run of slow steps opens as fast as a dense one."""
COMPRESS = 64
"""Rows from which a batch of the tail is compressed: on a few rows LZ4 costs 1 ms a flush, and they are soon gone."""


def message(
    batch: pa.RecordBatch, buffers: Sequence[int], metadata: Mapping[bytes, bytes] | None = None, compress: bool = True
) -> bytes:
    """Return one batch as an IPC message with its checksums (`frames`), LZ4-compressed unless told otherwise.

    Args:
        batch: the rows.
        buffers: buffers of each column (`buffers_a_column`).
        metadata: more custom metadata.
        compress: whether to.
    """
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if compress else None, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema.remove_metadata(), options=options) as writer:
        plain = pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema.remove_metadata())
        writer.write_batch(plain, custom_metadata={**(metadata or {}), **frames.placeholder(len(buffers))})
        end = sink.tell()
    data = sink.getvalue()[:end]  # the schema's message, then the batch's
    first = frames.next_frame(io.BytesIO(data), 0, len(data))
    assert first is not None
    out = bytearray(data[first.size :])
    frames.seal(out, buffers)
    return bytes(out)


class ArrowSink:
    """Writes rows of one session, rank and part. Nothing touches the disk before the first `flush`.

    Attributes:
        rows: rows in no big batch yet.
        taken: whether a row ever came.
        lost: what could not be kept, for a note in the log.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.schema = make_schema(header)
        self.buffers = buffers_a_column(self.schema)
        self.lost = Lost()
        self.rows = RowBuffer(header.layers)
        self.taken = False
        self._in_main = Lost()
        self._in_tail = 0
        self._tail_batches = 0
        begin = self._begin()
        self._main = AppendFile(folder / stream_name(header), begin)
        self._tail = AppendFile(folder / stream_name(header, tail=True), begin)

    def _begin(self, chunk: Mapping[str, Any] | None = None) -> bytes:
        """Return the schema and a first batch: pyarrow writes no schema before one, and some readers want one.

        The batch carries a copy of the header, in case the schema gets damaged.
        """
        batch = to_batch({"row": np.zeros(0, np.int64)} if chunk is None else chunk, self.schema)
        copy = {HEADER_KEY: self.schema.metadata[HEADER_KEY]}
        return bytes(self.schema.serialize()) + message(batch, self.buffers, copy)

    def message(self, chunk: Mapping[str, Any], compress: bool = True) -> bytes:
        """Return columns (see `to_batch`) as one batch's message."""
        return message(to_batch(chunk, self.schema), self.buffers, compress=compress)

    @property
    def pending(self) -> int:
        """Rows not on disk yet."""
        return len(self.rows) - self._in_tail

    def write(self, row: Row) -> None:
        """Take a row; it reaches the disk with the next `flush`."""
        if self.rows.full:
            count = max(self.rows.capacity // 8, 1)
            # Those of them that the tail holds go as well, when the disk has room again and it is begun anew.
            self.lost.add(self.rows.steps(0, count), "nothing could be written")
            self.rows.drop(count)
            self._in_tail = max(self._in_tail - count, 0)
        self.rows.append(row)
        self.taken = True

    def append(self, chunk: Mapping[str, Any]) -> None:
        """Write columns (see `to_batch`) straight into the main file as one batch; for rows made in bulk."""
        self._main.append(self.message(chunk))

    def flush(self) -> None:
        """Put every row on disk, and the header if it is not there.

        Raises:
            OSError: it could not; the rows are kept and tried again at the next flush.
        """
        if self._main.ensure():
            self.lost.join(self._in_main, "the log was removed while it was written")
            self._in_main = Lost()
            self._tail_batches = TAIL_BATCHES
        while self.rows.ripe:
            self._append_main(min(self.rows.big, len(self.rows)))
            self._tail_batches = TAIL_BATCHES  # what the tail holds is in the main file: begin it anew
        if self._tail_batches >= TAIL_BATCHES or not self._tail.in_place():
            self._tail.renew(self._begin(self.rows.chunk(0, len(self.rows))))
            self._tail_batches = 0
        elif self.pending:
            fresh = self.rows.chunk(self._in_tail, len(self.rows))
            self._tail.append(self.message(fresh, compress=self.pending >= COMPRESS))
            self._tail_batches += 1
        self._in_tail = len(self.rows)

    def _append_main(self, count: int) -> None:
        self._main.append(self.message(self.rows.chunk(0, count)))
        self._in_main.add(self.rows.steps(0, count), "")
        self.rows.drop(count)
        self._in_tail = max(self._in_tail - count, 0)

    def touch(self) -> None:
        """Update the heartbeat.

        Raises:
            OSError: the files are gone.
        """
        self._main.touch()
        self._tail.touch()

    def abandon(self) -> None:
        """Close the files as they are."""
        self._main.close()
        self._tail.close()

    def close(self) -> None:
        """Write what is left as a last batch and mark the stream finished.

        Raises:
            OSError: it could not be written; it may be tried again.
        """
        self.flush()
        if len(self.rows):
            self._append_main(len(self.rows))
        self._main.append(frames.END)
        self._tail.path.unlink(missing_ok=True)
        self.abandon()


def stream_name(header: Header, tail: bool = False) -> str:
    """Return the file name of a stream."""
    part = f"-part{header.part}" if header.part else ""
    kind = "" if header.kind == "gradients" else f".{header.kind}"
    return f"ampscope-{header.session}-rank{header.rank}{part}{kind}{'.tail' if tail else ''}.arrows"
