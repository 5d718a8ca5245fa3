"""Arrow IPC messages in a file: where each begins, where each column lies in it, whether the checksums hold.

A stream is read message by message and column by column, never memory-mapped (a file truncated underneath would end in
SIGBUS). Formats: Arrow columnar format specification, "Encapsulated message format"; `Message.fbs` for the tables read
here.

The checksum is text in a batch's custom metadata, `ampscope.crc32` = `crc32:HHHHHHHH,CCCCCCCC…`: first the CRC-32 of
the message's metadata with those eight digits all 0, then the CRC-32 of each column's bytes in the body.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

CRC_KEY = b"ampscope.crc32"
CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + b"\0\0\0\0"
_CRC = re.compile(rb"crc32:([0-9a-f]{8}),((?:[0-9a-f]{8})*)")
_MAX_METADATA = 64 << 20
_SCHEMA, _BATCH = 1, 3

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message: `offset` of its first byte, bytes of metadata (with the 8-byte prefix) and of body.

    Of a batch also `buffers`, where each buffer begins in the body, and `crcs`, one CRC-32 a column.
    """

    offset: int
    head: int
    body: int
    buffers: Array
    crcs: Array

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.head + self.body


class _Table:
    """A flatbuffer table, read field by field."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - struct.unpack_from("<i", data, at)[0]
        if self._vtable < 0:
            raise ValueError("not an Arrow message")
        self._size = struct.unpack_from("<H", data, self._vtable)[0]

    def _field(self, index: int) -> int:
        slot = 4 + 2 * index
        if slot + 2 > self._size:
            return 0
        offset = int(struct.unpack_from("<H", self._data, self._vtable + slot)[0])
        return self._at + offset if offset else 0

    def number(self, index: int, code: str) -> int:
        """Return a scalar field, 0 where it is absent."""
        at = self._field(index)
        return int(struct.unpack_from("<" + code, self._data, at)[0]) if at else 0

    def target(self, index: int) -> int:
        """Return where the table or vector of a field begins; 0 where it is absent."""
        at = self._field(index)
        return at + int(struct.unpack_from("<I", self._data, at)[0]) if at else 0


def _read_head(data: bytes) -> tuple[int, int, Array]:
    """Return (kind of message, length of its body, where its buffers begin in the body) of a Message flatbuffer.

    Raises:
        ValueError: the bytes are no such table.
    """
    try:
        message = _Table(data, struct.unpack_from("<I", data, 0)[0])
        kind, body = message.number(1, "B"), message.number(3, "q")
        if body < 0 or kind not in (_SCHEMA, _BATCH):
            raise ValueError("not an Arrow message that a log holds")
        starts = np.zeros(0, np.int64)
        if kind == _BATCH:
            vector = _Table(data, message.target(2)).target(2)
            count = struct.unpack_from("<I", data, vector)[0] if vector else 0
            pairs = np.frombuffer(data, np.int64, 2 * count, vector + 4).reshape(-1, 2)
            starts = pairs[:, 0].copy()
            if (pairs < 0).any() or (np.diff(starts) < 0).any() or (count and int(pairs[-1].sum()) > body):
                raise ValueError("buffers outside the message's body")
    except struct.error:
        raise ValueError("not an Arrow message") from None
    return kind, body, starts


def custom_metadata(head: bytes) -> dict[bytes, bytes]:
    """Return the custom metadata of a message, given its metadata with the 8-byte prefix.

    Raises:
        ValueError: the bytes are no message.
    """
    data = head[8:]
    out = {}
    try:
        vector = _Table(data, struct.unpack_from("<I", data, 0)[0]).target(4)
        count = struct.unpack_from("<I", data, vector)[0] if vector else 0
        for at in range(vector + 4, vector + 4 + 4 * count, 4):
            pair = _Table(data, at + struct.unpack_from("<I", data, at)[0])
            texts = []
            for start in (pair.target(0), pair.target(1)):
                size = struct.unpack_from("<I", data, start)[0]
                texts.append(data[start + 4 : start + 4 + size])
            out[texts[0]] = texts[1]
    except struct.error:
        raise ValueError("not an Arrow message") from None
    return out


def next_frame(file: BinaryIO, offset: int, size: int) -> Frame | None:
    """Return the message at `offset` of a file of `size` bytes; None where it is not complete, or the stream ends.

    Raises:
        ValueError: what stands there is no message, or the checksum of its metadata does not hold.
    """
    if offset + 8 > size:
        return None
    file.seek(offset)
    prefix = file.read(8)
    if len(prefix) < 8:
        return None
    if prefix[:4] != CONTINUATION:
        raise ValueError("no message marker")
    length = struct.unpack("<i", prefix[4:])[0]
    if length == 0:
        return None
    if not 0 < length <= _MAX_METADATA or length % 8:
        raise ValueError("impossible metadata length")
    if offset + 8 + length > size:
        return None
    data = file.read(length)
    if len(data) < length:
        return None
    kind, body, buffers = _read_head(data)
    crcs = np.zeros(0, np.uint32)
    if kind == _BATCH:
        crcs = _column_crcs(prefix + data)
    frame = Frame(offset, 8 + length, body, buffers, crcs)
    return frame if offset + frame.size <= size else None


def _column_crcs(head: bytes) -> Array:
    found = _CRC.search(head)
    if found is None:
        raise ValueError("no CRC-32")
    blank = head[: found.start(1)] + b"0" * 8 + head[found.end(1) :]
    if zlib.crc32(blank) != int(found[1], 16):
        raise ValueError("CRC-32 of its metadata")
    return np.frombuffer(bytes.fromhex(found[2].decode()), ">u4").astype(np.uint32)


def spans(frame: Frame, buffers_a_column: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first byte, end) in the body of each column; together they cover the body.

    Raises:
        ValueError: the batch does not have these columns.
    """
    first = np.concatenate([[0], np.cumsum(buffers_a_column)])
    if first[-1] != len(frame.buffers) or len(frame.crcs) != len(buffers_a_column):
        raise ValueError("columns differ from the schema's")
    starts = [int(frame.buffers[i]) for i in first[:-1]]
    if starts:
        starts[0] = 0
    return list(zip(starts, [*starts[1:], frame.body], strict=True))


def placeholder(columns: int) -> dict[bytes, bytes]:
    """Return the custom metadata to write a batch of so many columns with, before `seal`."""
    return {CRC_KEY: b"crc32:" + b"0" * 8 + b"," + b"0" * (8 * columns)}


def seal(message: bytearray, buffers_a_column: Sequence[int]) -> None:
    """Put the checksums into a batch's message that was written with `placeholder`."""
    length = struct.unpack_from("<i", message, 4)[0]
    head = 8 + length
    _, body, buffers = _read_head(bytes(message[8:head]))
    frame = Frame(0, head, body, buffers, np.zeros(len(buffers_a_column), np.uint32))
    found = _CRC.search(message, 0, head)
    assert found is not None
    at, columns = found.start(1), found.start(2)
    view = memoryview(message)
    sums = [zlib.crc32(view[head + a : head + b]) for a, b in spans(frame, buffers_a_column)]
    text = b"".join(b"%08x" % s for s in sums)
    view[columns : columns + len(text)] = text
    view[at : at + 8] = b"%08x" % zlib.crc32(view[:head])


def resync(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return the offset of the next sound message at or after `offset`, or None."""
    offset += -offset % 8
    chunk = 1 << 20
    while offset < size:
        file.seek(offset)
        data = file.read(chunk + 8)
        at = data.find(CONTINUATION)
        while at >= 0:
            if (offset + at) % 8 == 0:
                try:
                    frame = next_frame(file, offset + at, size)
                except ValueError:
                    frame = None
                if frame is not None and len(frame.crcs):
                    return frame.offset
            at = data.find(CONTINUATION, at + 1)
        offset += chunk
    return None
