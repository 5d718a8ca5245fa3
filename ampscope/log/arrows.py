"""The Arrow sink: big batches in one file, rows not yet in one in a short tail file beside it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ampscope.log import frames
from ampscope.log.buffer import RowBuffer
from ampscope.log.encode import Row, to_batch
from ampscope.log.schema import Header, buffers_a_column, make_schema

TAIL_BATCHES = 64
"""Batches after which the tail is begun anew as one batch, so that a run of slow steps opens as fast as a dense one."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


def message(batch: pa.RecordBatch, buffers: Sequence[int]) -> bytes:
    """Return one batch as an IPC message, LZ4-compressed, with its checksums (`frames`).

    Args:
        batch: the rows.
        buffers: buffers of each column (`buffers_a_column`).
    """
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema.remove_metadata(), options=_OPTIONS) as writer:
        plain = pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema.remove_metadata())
        writer.write_batch(plain, custom_metadata=frames.placeholder(len(buffers)))
        end = sink.tell()
    data = sink.getvalue()[:end]  # the schema's message, then the batch's
    first = frames.next_frame(io.BytesIO(data), 0, len(data))
    assert first is not None
    out = bytearray(data[first.size :])
    frames.seal(out, buffers)
    return bytes(out)


class AppendFile:
    """A file that only grows, by whole messages: what a failed write left behind is cut off before the next."""

    def __init__(self, path: Path, begin: bytes) -> None:
        self.path, self._begin = path, begin
        self._file: BinaryIO | None = None
        self._good = 0
        self._create()

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            file = open(temporary, "wb", buffering=0)  # noqa: SIM115  (stays open)
            self._write(file, self._begin)
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._file, self._good = file, len(self._begin)

    @staticmethod
    def _write(file: BinaryIO, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    def append(self, data: bytes) -> None:
        """Write one message, at once.

        Raises:
            OSError: the disk is full, the folder is gone, ...; the file is as it was.
        """
        self.ensure()
        assert self._file is not None
        try:
            self._file.seek(self._good)
            self._write(self._file, data)
        except OSError:
            try:
                self._file.truncate(self._good)
            except OSError:
                pass  # the next append begins at the same place
            raise
        self._good += len(data)

    def linked(self) -> bool:
        """Whether the file is still where it was made."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def ensure(self) -> bool:
        """Begin the file anew if it was removed or moved; return whether it was."""
        if self.linked():
            return False
        self._create()
        return True

    def touch(self) -> None:
        """Update the file's time: the writer lives."""
        os.utime(self.path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ArrowSink:
    """Writes rows of one session, rank and part."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.schema = make_schema(header)
        self.buffers = buffers_a_column(self.schema)
        self.rows = RowBuffer(len(header.layers))
        self.recreated = False
        """Whether the main file was removed under the writer, and what it held with it."""
        self._in_tail = 0
        self._tail_batches = 0
        begin = self._begin()
        self._main = AppendFile(folder / stream_name(header), begin)
        self._tail = AppendFile(folder / stream_name(header, tail=True), begin)

    def _begin(self, chunk: Mapping[str, Any] | None = None) -> bytes:
        """Return the schema and a first batch: pyarrow writes no schema before one, and some readers want one."""
        empty = {"row": np.zeros(0, np.int64)}
        return bytes(self.schema.serialize()) + self.message(empty if chunk is None else chunk)

    def message(self, chunk: Mapping[str, Any]) -> bytes:
        """Return columns (see `to_batch`) as one batch's message."""
        return message(to_batch(chunk, self.schema), self.buffers)

    @property
    def pending(self) -> int:
        """Rows not on disk yet."""
        return len(self.rows) - self._in_tail

    def write(self, row: Row) -> None:
        """Take a row; it reaches the disk with the next `flush`."""
        before = self.rows.dropped
        self.rows.append(row)
        self._in_tail = max(self._in_tail - (self.rows.dropped - before), 0)

    def append(self, chunk: Mapping[str, Any]) -> None:
        """Write columns (see `to_batch`) straight into the main file as one batch; for rows made in bulk."""
        self._main.append(self.message(chunk))

    def flush(self) -> None:
        """Put every row on disk.

        Raises:
            OSError: it could not; the rows are kept and tried again at the next flush.
        """
        big = self.rows.big
        self.recreated |= self._main.ensure()
        while len(self.rows) >= big:
            self._main.append(self.message(self.rows.chunk(0, big)))
            self.rows.drop(big)
            self._in_tail = max(self._in_tail - big, 0)
            self._tail_batches = TAIL_BATCHES  # what the tail holds is in the main file: begin it anew
        if self._tail_batches >= TAIL_BATCHES or not self._tail.linked():
            self._new_tail()
        elif self.pending:
            self._tail.append(self.message(self.rows.chunk(self._in_tail, len(self.rows))))
            self._tail_batches += 1
            self._in_tail = len(self.rows)

    def _new_tail(self) -> None:
        """Begin the tail anew with the rows that are in no big batch."""
        fresh = AppendFile(self._tail.path, self._begin(self.rows.chunk(0, len(self.rows))))
        self._tail.close()
        self._tail = fresh
        self._tail_batches = 0
        self._in_tail = len(self.rows)

    def touch(self) -> None:
        """Update the heartbeat.

        Raises:
            OSError: the files are gone.
        """
        self._tail.touch()
        self._main.touch()

    def abandon(self) -> None:
        """Close a stream that holds no row; the next sink of the same name replaces it."""
        self._main.close()
        self._tail.close()

    def close(self) -> None:
        """Write what is left as a last batch and mark the stream finished.

        Raises:
            OSError: it could not be written.
        """
        try:
            if len(self.rows):
                self._main.append(self.message(self.rows.chunk(0, len(self.rows))))
                self.rows.drop(len(self.rows))
                self._in_tail = 0
            self._main.append(frames.END)
            self._tail.path.unlink(missing_ok=True)
        finally:
            self._main.close()
            self._tail.close()


def stream_name(header: Header, tail: bool = False) -> str:
    """Return the file name of a stream."""
    part = f"-part{header.part}" if header.part else ""
    kind = "" if header.kind == "gradients" else f".{header.kind}"
    return f"ampscope-{header.session}-rank{header.rank}{part}{kind}{'.tail' if tail else ''}.arrows"
