"""Arrow IPC messages in a file: where each begins, how long it is, whether its CRC-32 holds.

A stream is read message by message, never memory-mapped (a file truncated underneath would end in SIGBUS). Format:
Arrow columnar format specification, "Encapsulated message format".
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

CRC_KEY = "ampscope.crc32"
_CRC = re.compile(rb"ampscope\.crc32=([0-9a-f]{8})")
_CONTINUATION = b"\xff\xff\xff\xff"
_MAX_METADATA = 64 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: `offset` of its first byte, bytes of metadata (with the 8-byte prefix) and of body."""

    offset: int
    head: int
    body: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.head + self.body


def body_length(metadata: bytes) -> int:
    """Return the body's length from a Message flatbuffer (its field 3).

    Raises:
        ValueError: the bytes are no such table.
    """
    try:
        table = struct.unpack_from("<I", metadata, 0)[0]
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        size = struct.unpack_from("<H", metadata, vtable)[0]
        if vtable < 0 or size < 8:
            raise ValueError("not an Arrow message")
        at = struct.unpack_from("<H", metadata, vtable + 10)[0] if size >= 12 else 0
        length = struct.unpack_from("<q", metadata, table + at)[0] if at else 0
    except struct.error:
        raise ValueError("not an Arrow message") from None
    if length < 0:
        raise ValueError("negative body length")
    return int(length)


def next_frame(file: BinaryIO, offset: int, size: int) -> Frame | None:
    """Return the message at `offset` of a file of `size` bytes, or None where it is not complete (or the stream ends there).

    Raises:
        ValueError: what stands there is no message.
    """
    if offset + 8 > size:
        return None
    file.seek(offset)
    prefix = file.read(8)
    if len(prefix) < 8:
        return None
    if prefix[:4] != _CONTINUATION:
        raise ValueError("no message marker")
    length = struct.unpack("<i", prefix[4:])[0]
    if length == 0:
        return None
    if not 0 < length <= _MAX_METADATA or length % 8:
        raise ValueError("impossible metadata length")
    if offset + 8 + length > size:
        return None
    frame = Frame(offset, 8 + length, body_length(file.read(length)))
    return frame if offset + frame.size <= size else None


def intact(message: bytes, frame: Frame) -> bool:
    """Whether the CRC-32 in the metadata fits the body (a message without one, such as a schema, counts as intact)."""
    found = _CRC.search(message, 8, frame.head)
    return found is None or int(found[1], 16) == zlib.crc32(memoryview(message)[frame.head :])


def has_crc(message: bytes, frame: Frame) -> bool:
    """Whether the message carries a CRC-32."""
    return _CRC.search(message, 8, frame.head) is not None


def resync(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return the offset of the next believable message at or after `offset`, or None."""
    offset += -offset % 8
    chunk = 1 << 20
    while offset < size:
        file.seek(offset)
        data = file.read(chunk + 8)
        at = data.find(_CONTINUATION)
        while at >= 0:
            if (offset + at) % 8 == 0:
                try:
                    frame = next_frame(file, offset + at, size)
                except ValueError:
                    frame = None
                if frame is not None:
                    file.seek(frame.offset)
                    message = file.read(frame.size)
                    if has_crc(message, frame) and intact(message, frame):
                        return frame.offset
            at = data.find(_CONTINUATION, at + 1)
        offset += chunk
    return None
