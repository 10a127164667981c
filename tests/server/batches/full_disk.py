"""A disk with room for so many bytes, of which a writer gets what is left and then an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from eventlm.system.disk import FileStatus, SystemDisk, WritableFile


class FullDisk(SystemDisk):
    """`room`: bytes that can still be written; None: as many as there are. May be changed at any time."""

    def __init__(self) -> None:
        self.room: int | None = None

    def create(self, path: Path) -> WritableFile:
        return _File(self, super().create(path))

    def append(self, path: Path) -> WritableFile:
        return _File(self, super().append(path))


class _File:
    def __init__(self, disk: FullDisk, file: WritableFile) -> None:
        self._disk = disk
        self._file = file

    def write(self, content: bytes) -> int:
        room = self._disk.room
        if room is None:
            return self._file.write(content)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(content[:room])
        self._disk.room = room - written
        return written

    def status(self) -> FileStatus:
        return self._file.status()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
