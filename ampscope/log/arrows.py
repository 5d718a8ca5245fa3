"""The Arrow sink: big batches in one file, rows not yet in one in a short tail file beside it."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from ampscope.log import frames
from ampscope.log.encode import Row, to_batch
from ampscope.log.schema import Header, make_schema

BIG = 1000
"""Rows of a big batch: scalars of a million rows read in 0.4 s from batches of 1,000, in minutes from batches of one."""
TAIL_BATCHES = 64
"""Batches after which the tail is begun anew as one batch, so that a run of slow steps opens as fast as a dense one."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def schema_message(schema: pa.Schema) -> bytes:
    """Return the message that begins a stream."""
    return bytes(schema.serialize())


def message(batch: pa.RecordBatch) -> bytes:
    """Return one batch as an IPC message, LZ4-compressed, with the CRC-32 of its body in its metadata."""
    plain = _encode(batch, None)
    frame = frames.next_frame(io.BytesIO(plain), 0, len(plain))
    assert frame is not None
    crc = zlib.crc32(memoryview(plain)[frame.head :])
    return _encode(batch, {f"{frames.CRC_KEY}={crc:08x}": ""})


def _encode(batch: pa.RecordBatch, metadata: dict[str, str] | None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        begin = sink.tell()
        writer.write_batch(batch, custom_metadata=metadata)
        end = sink.tell()
    data = sink.getvalue()[begin:end]
    if not begin:  # the schema message is written with the first batch
        first = frames.next_frame(io.BytesIO(data), 0, len(data))
        assert first is not None
        data = data[first.size :]
    return data


class AppendFile:
    """A file that only grows, by whole messages: what a failed write left behind is cut off before the next."""

    def __init__(self, path: Path, begin: bytes) -> None:
        self.path, self._begin = path, begin
        self._file: BinaryIO | None = None
        self._good = 0
        self._create()

    def _create(self) -> None:
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
        if self._file is None or not self._linked():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._create()
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

    def _linked(self) -> bool:
        assert self._file is not None
        try:
            return os.fstat(self._file.fileno()).st_nlink > 0
        except OSError:
            return False

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

    def __init__(self, folder: Path, header: Header, first_row: int = 0) -> None:
        self.folder, self.header = folder, header
        self.numel = np.array([layer.numel for layer in header.layers], np.int64)
        self.row = first_row
        self.lost = 0
        self._schema = make_schema(header)
        self._rows: list[Row] = []
        self._unflushed = 0
        self._tail_batches = 0
        stem = f"ampscope-{header.session}-rank{header.rank}" + (f"-part{header.part}" if header.part else "")
        if header.kind != "gradients":
            stem += f".{header.kind}"
        begin = schema_message(self._schema) + message(self._batch([]))
        self._main = AppendFile(folder / f"{stem}.arrows", begin)
        self._tail = AppendFile(folder / f"{stem}.tail.arrows", begin)

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        return to_batch(rows, self._schema, len(self.header.layers))

    @property
    def pending(self) -> int:
        """Rows not on disk yet."""
        return self._unflushed

    def write(self, row: Row) -> None:
        """Take a row; it reaches the disk with the next `flush`."""
        self._rows.append(row)
        self._unflushed += 1
        self.row = row.row + 1

    def flush(self) -> None:
        """Put every row on disk.

        Raises:
            OSError: it could not; the rows are kept and tried again at the next flush.
        """
        while len(self._rows) >= BIG:
            head = self._rows[:BIG]
            self._main.append(message(self._batch(head)))
            del self._rows[:BIG]
            self._unflushed = min(self._unflushed, len(self._rows))
            self._new_tail()
        if not self._unflushed:
            return
        if self._tail_batches >= TAIL_BATCHES:
            self._new_tail()
            if not self._unflushed:
                return
        self._tail.append(message(self._batch(self._rows[-self._unflushed :])))
        self._tail_batches += 1
        self._unflushed = 0

    def _new_tail(self) -> None:
        """Begin the tail anew with the rows that are in no big batch."""
        self._tail_batches = 0
        begin = schema_message(self._schema) + message(self._batch(self._rows))
        fresh = AppendFile(self._tail.path, begin)
        self._tail.close()
        self._tail = fresh
        self._unflushed = 0

    def drop_oldest(self, keep: int) -> int:
        """Forget rows that could not be written, all but the newest `keep`; return how many."""
        excess = max(len(self._rows) - keep, 0)
        del self._rows[:excess]
        self._unflushed = min(self._unflushed, len(self._rows))
        self.lost += excess
        return excess

    def touch(self) -> None:
        """Update the heartbeat."""
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
            if self._rows:
                self._main.append(message(self._batch(self._rows)))
                self._rows.clear()
                self._unflushed = 0
            self._main.append(END)
            self._tail.path.unlink(missing_ok=True)
        finally:
            self._main.close()
            self._tail.close()
