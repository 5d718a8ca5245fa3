"""A file that only grows, by whole messages, and survives full disks and removed folders."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO


class AppendFile:
    """Appends messages. Nothing is made before the first `ensure` or `append`.

    What a failed write left behind is cut off before the next one. A file that was removed or moved meanwhile is begun
    anew.
    """

    def __init__(self, path: Path, begin: bytes) -> None:
        """Remember `begin`, the bytes every such file starts with."""
        self.path, self.begin = path, begin
        self._file: BinaryIO | None = None
        self._size = 0

    def ensure(self) -> bool:
        """Make the file if it is not there; return whether one made earlier had gone.

        Raises:
            OSError: it cannot be made.
        """
        made_before = self._file is not None
        if made_before and self.in_place():
            return False
        self.renew(self.begin)
        return made_before

    def renew(self, begin: bytes) -> None:
        """Put a file of these bytes in place of the old one, in one step: a reader sees the old or the new.

        Raises:
            OSError: it cannot be made; the old one goes on.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        file = open(temporary, "wb", buffering=0)  # noqa: SIM115  (stays open; unbuffered: a forked child has nothing to flush)
        try:
            _write(file, begin)
            os.replace(temporary, self.path)
        except OSError:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._file, self._size = file, len(begin)

    def append(self, data: bytes) -> None:
        """Write one message, at once.

        Raises:
            OSError: the disk is full, the folder cannot be made, ...; the file is as it was.
        """
        self.ensure()
        assert self._file is not None
        try:
            self._file.seek(self._size)
            _write(self._file, data)
        except OSError:
            with contextlib.suppress(OSError):  # the next append begins at the same place
                self._file.truncate(self._size)
            raise
        self._size += len(data)

    def in_place(self) -> bool:
        """Whether the file is still where it was made."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def touch(self) -> None:
        """Update the file's time: the writer lives.

        Raises:
            OSError: the file is gone.
        """
        if self._file is not None:
            os.utime(self.path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
