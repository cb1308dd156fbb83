"""A file that is a function of another one: written forward, and made right again when it is opened.

Invariants: what is put stands in the file in this order and nothing else does, once ``settle`` was called; a write that
fails leaves no part of what was put.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Derived:
    """A file that must hold exactly what is put: what it holds already is compared, the rest is written.

    ``keep``: the file is there also when nothing was put.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path, self.size = path, 0
        self._keep = keep
        self._descriptor = -1
        self._comparing = True
        self._dirty = False

    def put(self, data: bytes) -> None:
        self._open()
        if self._comparing:
            if _read_all(self._descriptor, len(data)) == data:
                self.size += len(data)
                return
            self._cut()
        try:
            write_all(self._descriptor, data)
        except OSError:
            with suppress(OSError):
                self._cut()
            raise
        self.size += len(data)
        self._dirty = True

    def skip(self, size: int) -> None:
        """So many bytes were put before, and are taken as they are."""
        if size:
            self._open()
            self.size = os.lseek(self._descriptor, size, os.SEEK_SET)

    def settle(self) -> None:
        """What there was has been put again: cut what is more."""
        if self._descriptor < 0 and self.path.exists() and not self._keep:
            os.unlink(self.path)
        elif self._descriptor >= 0 and self._comparing:
            self._cut()
        self._comparing = False

    def sync(self) -> None:
        if self._descriptor >= 0 and self._dirty:
            os.fsync(self._descriptor)
            self._dirty = False

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _cut(self) -> None:
        os.ftruncate(self._descriptor, self.size)
        os.lseek(self._descriptor, self.size, os.SEEK_SET)
        self._comparing = False


def _write(descriptor: int, data: bytes | memoryview) -> int:
    return os.write(descriptor, data)


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[_write(descriptor, left) :]


def _read_all(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size)
    while len(data) < size and (piece := os.read(descriptor, size - len(data))):
        data += piece
    return data
