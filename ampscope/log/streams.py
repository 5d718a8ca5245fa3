"""Reading streams back, as they grow. What is torn or damaged costs its batch, is reported, and raises nothing."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ampscope.errors import LogError
from ampscope.log import frames
from ampscope.log.schema import FORMAT_VERSION, HEADER_KEY, Header, buffers_a_column, make_schema

STREAM = re.compile(r"^ampscope-(\d+)-rank(\d+)(?:-part(\d+))?(?:\.(?!tail\b)([a-z]+))?\.arrows$")
HEARTBEAT = 5.0
"""Seconds between touches of a live stream."""
Array = np.ndarray[Any, Any]
ARROW_ERRORS = (
    OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, pa.ArrowMemoryError, pa.ArrowTypeError,
    pa.ArrowIndexError, pa.ArrowSerializationError, UnicodeDecodeError, json.JSONDecodeError, KeyError, ValueError,
    MemoryError,
)  # fmt: skip
"""What reading damaged Arrow data was seen to raise."""


class Stream:
    """One `.arrows` file, read incrementally: `read_new` finds what was appended, `load` reads columns of one batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: list[str] = []
        self.torn = 0
        """Bytes at the end that are no whole message: one is being written, or the file was cut there."""
        self.finished = False
        self.header: Header | None = None
        self.schema: pa.Schema | None = None
        self._buffers: list[int] = []
        self._schema_bytes = b""
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._mark = (0, 0, 0)
        """Offset, length and CRC-32 of the last metadata read: an inode's number may be given to the next file."""

    def read_header(self) -> Header | None:
        """Return the header, None while the file is empty; reads nothing else.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        if self.header is None:
            try:
                with open(self.path, "rb") as file:
                    stat = os.fstat(file.fileno())
                    if self._read_schema(file, stat.st_size):
                        self._identity = _identity(stat)
            except OSError as error:
                self._note(f"cannot be read ({error.strerror or error})")
        return self.header

    def read_new(self, columns: Sequence[str] = ()) -> tuple[bool, list[tuple[frames.Frame, pa.RecordBatch | None]]]:
        """Return (begun anew, [(message, batch)]): what was appended since the last call, with these columns.

        If the file was begun anew (a tail, or an empty stream given a new header), what was read of it before is void.
        A batch is None where it is damaged, or where `columns` is empty. Frames and batches are of one file, even if it
        is replaced meanwhile.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                identity = _identity(stat)
                anew = self._identity is not None and not (
                    identity == self._identity and stat.st_size >= self._offset and self._continues(file)
                )
                if self._identity is None or anew:
                    self._identity = identity
                    self._offset, self.finished, self.schema, self.header = 0, False, None, None
                    self._mark = (0, 0, 0)
                    self.damage.clear()
                found = self._scan(file, stat.st_size)
                self.torn = 0 if self.finished else stat.st_size - self._offset
                if found:
                    self._remember(file, found[-1].offset, found[-1].head)
                return anew, [(frame, self._load(file, frame, columns) if columns else None) for frame in found]
        except FileNotFoundError:
            gone = self._identity is not None
            self._identity = None
            return gone, []
        except OSError as error:
            self._note(f"cannot be read ({error.strerror or error})")
            return False, []

    def _continues(self, file: BinaryIO) -> bool:
        """Whether what was read last still stands where it stood."""
        at, length, crc = self._mark
        file.seek(at)
        return zlib.crc32(file.read(length)) == crc

    def _remember(self, file: BinaryIO, at: int, length: int) -> None:
        file.seek(at)
        self._mark = at, length, zlib.crc32(file.read(length))

    def _scan(self, file: BinaryIO, size: int) -> list[frames.Frame]:
        found: list[frames.Frame] = []
        if self.schema is None and not self._read_schema(file, size):
            return found
        while True:
            try:
                frame = frames.next_frame(file, self._offset, size)
            except ValueError as error:
                where = frames.resync(file, self._offset + 8, size)
                lost = (where or size) - self._offset
                self._note(f"{lost} bytes at {self._offset} are damaged ({error}) and were left out")
                self._offset = where or size
                if where is None:
                    return found
                continue
            if frame is None:
                file.seek(self._offset)
                self.finished = file.read(8) == frames.END
                if not self.finished and size - self._offset > 8:
                    where = frames.resync(file, self._offset + 8, size)
                    if where is not None:  # a damaged length hid what follows
                        self._note(f"{where - self._offset} bytes at {self._offset} are damaged and were left out")
                        self._offset = where
                        continue
                return found
            found.append(frame)
            self._offset += frame.size

    def _read_schema(self, file: BinaryIO, size: int) -> bool:
        file.seek(0)
        begin = file.read(4)
        if begin and begin != frames.CONTINUATION[: len(begin)] and b"ampscope" not in begin + file.read(1 << 16):
            raise LogError(f"{self.path} is not an ampscope log (not an Arrow stream)")
        try:
            frame = frames.next_frame(file, 0, size)
            if frame is None:
                if frames.resync(file, 8, size) is None:
                    return False  # it is still being written
                raise ValueError("cut")
            file.seek(0)
            schema = pa.ipc.read_schema(pa.BufferReader(file.read(frame.size)))
            header, offset = Header.from_schema(schema, str(self.path)), frame.size
        except (LogError, *ARROW_ERRORS) as error:
            found = self._header_copy(file, size)
            if found is None:
                if isinstance(error, LogError):
                    raise
                raise LogError(f"{self.path} is not an ampscope log, or its beginning is damaged") from None
            header, offset = found
            schema = make_schema(header)
            self._note("the header is damaged; its copy was used")
        if not {"row", "is_step", "step"} <= set(schema.names):
            raise LogError(f"{self.path} is not an ampscope log (it lacks the columns every log has)")
        self.header, self.schema, self._offset = header, schema, offset
        self._remember(file, 0, offset)
        self._buffers = buffers_a_column(schema)
        self._schema_bytes = bytes(schema.remove_metadata().serialize())
        return True

    def _header_copy(self, file: BinaryIO, size: int) -> tuple[Header, int] | None:
        """Return (header, offset of the first batch) from the copy in the first batch, None where there is none."""
        at = frames.resync(file, 8, size)
        if at is None:
            return None
        file.seek(at)
        prefix = file.read(8)
        raw = frames.custom_metadata(prefix + file.read(int.from_bytes(prefix[4:], "little"))).get(HEADER_KEY)
        header = Header.from_json(raw, str(self.path)) if raw is not None else None
        return (header, at) if header is not None and header.version == FORMAT_VERSION else None

    def load(self, frame: frames.Frame, columns: Sequence[str]) -> pa.RecordBatch | None:
        """Read some columns of one batch (those that it has); None, and a note in `damage`, where it is damaged.

        Only the bytes of these columns are read. Their CRC-32 is checked and they are validated in full: a flipped bit
        would end in a segmentation fault otherwise.
        """
        try:
            with open(self.path, "rb") as file:
                return self._load(file, frame, columns)
        except FileNotFoundError:
            self._note("vanished while it was being read")
        except OSError as error:
            self._note(f"cannot be read ({error.strerror or error})")
        return None

    def _load(self, file: BinaryIO, frame: frames.Frame, columns: Sequence[str]) -> pa.RecordBatch | None:
        assert self.schema is not None
        wanted = set(columns)
        picked = [i for i, name in enumerate(self.schema.names) if name in wanted]
        try:
            ranges = frames.spans(frame, self._buffers)
            start = len(self._schema_bytes)
            # Pages that no column is read into are never touched, so they cost nothing.
            data = np.zeros(start + frame.size, np.uint8)
            view = memoryview(data.data)
            view[:start] = self._schema_bytes
            _read_into(file, frame.offset, view[start : start + frame.head])
            body = start + frame.head
            for first, last in _merged([ranges[i] for i in picked]):
                _read_into(file, frame.offset + frame.head + first, view[body + first : body + last])
            for i in picked:
                a, b = ranges[i]
                if zlib.crc32(view[body + a : body + b]) != frame.crcs[i]:
                    self._note(
                        f"the batch at {frame.offset} is damaged (CRC-32, {self.schema.names[i]}) and was left out"
                    )
                    return None
            options = pa.ipc.IpcReadOptions(included_fields=picked, use_threads=False)
            with pa.ipc.open_stream(pa.py_buffer(data), options=options) as reader:
                batch = reader.read_next_batch()
            batch.validate(full=True)
        except EOFError:
            self._note(f"the batch at {frame.offset} is cut")
            return None
        except (StopIteration, *ARROW_ERRORS) as error:
            self._note(f"the batch at {frame.offset} is damaged ({type(error).__name__}) and was left out")
            return None
        return batch

    def _note(self, text: str) -> None:
        line = f"{self.path.name}: {text}"
        if line not in self.damage:
            self.damage.append(line)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _read_into(file: BinaryIO, offset: int, view: memoryview) -> None:
    file.seek(offset)
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        view = view[got:]


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring ranges, so that they are read at once."""
    out: list[tuple[int, int]] = []
    for a, b in ranges:
        if out and a == out[-1][1]:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def stream_files(folder: Path, kind: str = "gradients") -> list[tuple[int, int, int, Path]]:
    """Return (session, rank, part, path) of every main stream of a kind in a run's folder, in order."""
    found = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for entry in entries:
        match = STREAM.match(entry.name)
        if match and (match[4] or "gradients") == kind:
            found.append((int(match[1]), int(match[2]), int(match[3] or 0), entry))
    return sorted(found)


def tail_of(path: Path) -> Path:
    """Return the path of a main stream's tail."""
    return path.with_name(path.name.removesuffix(".arrows") + ".tail.arrows")


def earlier(folder: Path, session: int) -> dict[str, Array]:
    """Return `step` and `skipped` of every step that earlier sessions recorded, any rank; the later one of two wins.

    Raises:
        LogError: a stream there is of a newer version, or not an ampscope log.
    """
    parts: list[tuple[Array, Array]] = []
    for number, _, _, path in stream_files(folder):
        if number < session:
            for name in (tail_of(path), path):
                _, found = Stream(name).read_new(("is_step", "step", "skipped"))
                for _, batch in found:
                    if batch is not None and batch.num_rows:
                        on = batch.column("is_step").to_numpy(zero_copy_only=False)
                        parts.append((batch.column("step").to_numpy()[on], batch.column("skipped").to_numpy()[on]))
    steps = np.concatenate([p[0] for p in parts]) if parts else np.zeros(0, np.int64)
    skipped = np.concatenate([p[1] for p in parts]) if parts else np.zeros(0)
    unique, last = np.unique(steps[::-1], return_index=True)
    return {"step": unique, "skipped": skipped[::-1][last]}
