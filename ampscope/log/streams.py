"""Reading streams back, as they grow. What is torn or damaged costs its batch, is reported, and raises nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ampscope.errors import LogError
from ampscope.log import frames
from ampscope.log.rundir import STREAM
from ampscope.log.schema import Header

ARROW_ERRORS = (
    OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, pa.ArrowMemoryError, pa.ArrowTypeError,
    pa.ArrowIndexError, pa.ArrowSerializationError, UnicodeDecodeError, json.JSONDecodeError, KeyError, ValueError, MemoryError,
)  # fmt: skip
"""What reading damaged Arrow data was seen to raise."""


class Stream:
    """One `.arrows` file, read incrementally: `scan` finds new messages, `load` reads one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: list[str] = []
        self.finished = False
        self.header: Header | None = None
        self.schema: pa.Schema | None = None
        self._schema_bytes = b""
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def scan(self) -> list[frames.Frame]:
        """Return the messages that were appended since the last call.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        return [frame for frame, _ in self.read_new(())[1]]

    def read_new(self, columns: Sequence[str] | None = None) -> tuple[bool, list[tuple[frames.Frame, pa.RecordBatch | None]]]:
        """Return (begun anew, [(message, batch)]): what was appended since the last call, with some or all columns.

        If the file was begun anew (a tail, or an empty stream given a new header), what was read of it before is void. A batch is None
        where it is damaged, or where `columns` is empty. Frames and batches are of one and the same file, even if it is replaced meanwhile.

        Raises:
            LogError: a newer version, or not an ampscope log.
        """
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                anew = self._identity is not None and (identity != self._identity or stat.st_size < self._offset)
                if self._identity is None or anew:
                    self._identity = identity
                    self._offset, self.finished, self.schema, self.header = 0, False, None, None
                    self.damage.clear()
                found = self._scan(file, stat.st_size)
                if columns is not None and not columns:
                    return anew, [(frame, None) for frame in found]
                return anew, [(frame, self._load(file, frame, columns, False)) for frame in found]
        except FileNotFoundError:
            gone = self._identity is not None
            self._identity = None
            return gone, []
        except OSError as error:
            self._note(f"cannot be read ({error.strerror or error})")
            return False, []

    def _scan(self, file: BinaryIO, size: int) -> list[frames.Frame]:
        found: list[frames.Frame] = []
        if self.schema is None and not self._read_schema(file, size):
            return found
        while True:
            try:
                frame = frames.next_frame(file, self._offset, size)
            except ValueError as error:
                where = frames.resync(file, self._offset + 8, size)
                self._note(f"{(where or size) - self._offset} bytes at {self._offset} are unreadable ({error}) and were left out")
                if where is None:
                    self._offset = size
                    return found
                self._offset = where
                continue
            if frame is None:
                file.seek(self._offset)
                self.finished = file.read(8) == b"\xff\xff\xff\xff\0\0\0\0"
                if not self.finished:
                    where = frames.resync(file, self._offset + 8, size) if size - self._offset > 8 else None
                    if where is not None:  # a damaged length hid what follows
                        self._note(f"{where - self._offset} bytes at {self._offset} are unreadable and were left out")
                        self._offset = where
                        continue
                return found
            found.append(frame)
            self._offset += frame.size

    def _read_schema(self, file: BinaryIO, size: int) -> bool:
        try:
            frame = frames.next_frame(file, 0, size)
            if frame is None:
                if size >= 8:
                    file.seek(0)
                    if file.read(4) != b"\xff\xff\xff\xff":
                        raise LogError(f"{self.path} is not an ampscope log (not an Arrow stream)")
                return False
            file.seek(0)
            raw = file.read(frame.size)
            schema = pa.ipc.read_schema(pa.BufferReader(raw))
        except LogError:
            raise
        except ARROW_ERRORS:
            raise LogError(f"{self.path} is not an ampscope log, or its beginning is damaged") from None
        self.header = Header.from_schema(schema, str(self.path))
        self.schema, self._schema_bytes, self._offset = schema, raw, frame.size
        return True

    def load(self, frame: frames.Frame, columns: Sequence[str] | None = None, verified: bool = False) -> pa.RecordBatch | None:
        """Read one batch, all columns or some; None (and a note in `damage`) where it is damaged.

        A batch is validated in full, and its CRC-32 checked unless `verified`: a flipped bit would end in a segmentation fault otherwise.
        """
        try:
            with open(self.path, "rb") as file:
                return self._load(file, frame, columns, verified)
        except FileNotFoundError:
            self._note("vanished while it was being read")
        except OSError as error:
            self._note(f"cannot be read ({error.strerror or error})")
        return None

    def _load(self, file: BinaryIO, frame: frames.Frame, columns: Sequence[str] | None, verified: bool) -> pa.RecordBatch | None:
        try:
            file.seek(frame.offset)
            raw = file.read(frame.size)
            if len(raw) < frame.size:
                self._note(f"the batch at {frame.offset} is cut")
                return None
            if not verified and not frames.intact(raw, frame):
                self._note(f"the batch at {frame.offset} is damaged (CRC-32) and was left out")
                return None
            options = None
            if columns is not None:
                assert self.schema is not None
                wanted = set(columns)
                options = pa.ipc.IpcReadOptions(included_fields=[i for i, n in enumerate(self.schema.names) if n in wanted])
            with pa.ipc.open_stream(pa.BufferReader(self._schema_bytes + raw), options=options) as reader:
                batch = reader.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            return None
        except ARROW_ERRORS as error:
            self._note(f"the batch at {frame.offset} is damaged ({type(error).__name__}) and was left out")
            return None
        return batch

    def _note(self, text: str) -> None:
        line = f"{self.path.name}: {text}"
        if line not in self.damage:
            self.damage.append(line)


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


def last_step(folder: Path, before_session: int) -> int:
    """Return the last step any rank of the sessions before `before_session` recorded, or -1."""
    last = -1
    for session, _, _, path in stream_files(folder):
        if session >= before_session:
            continue
        for name in (path, tail_of(path)):
            last = max([last, *_steps(name)])
    return last


def _steps(path: Path) -> Iterator[int]:
    stream = Stream(path)
    try:
        found = stream.scan()
    except LogError:
        return
    for frame in reversed(found):
        batch = stream.load(frame, ("step", "is_step"))
        if batch is not None and batch.num_rows:
            steps = [s for s, ok in zip(batch.column("step").to_pylist(), batch.column("is_step").to_pylist(), strict=True) if ok]
            if steps:
                yield max(steps)
                return
