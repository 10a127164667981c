"""A disk in memory."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from eventlm.system.disk import FileStatus


class _Content(bytearray):
    """A file's bytes, whatever its names are."""

    is_locked = False

    def status(self) -> FileStatus:
        return FileStatus((0, id(self)), len(self), 0, is_file=True, is_folder=False)


class _Readable(io.BytesIO):
    """The content as it was when the file was opened; its status is that of now."""

    def __init__(self, content: _Content) -> None:
        super().__init__(bytes(content))
        self._content = content

    def status(self) -> FileStatus:
        return self._content.status()

    def is_locked(self) -> bool:
        return self._content.is_locked


class _Writable:
    def __init__(self, content: _Content) -> None:
        if content.is_locked:
            raise _error(BlockingIOError, errno.EAGAIN, Path())
        self._content = content
        self._is_open = content.is_locked = True

    def write(self, content: bytes) -> int:
        self._content.extend(content)
        return len(content)

    def truncate(self, num_bytes: int) -> None:
        del self._content[num_bytes:]

    def sync(self) -> None:
        pass

    def status(self) -> FileStatus:
        return self._content.status()

    def close(self) -> None:
        if self._is_open:
            self._is_open = self._content.is_locked = False


class MemoryDisk:
    """Methods are described at Disk. names: what each path names: a file, the target of a link, or None: a folder."""

    def __init__(self) -> None:
        self.names: dict[Path, _Content | str | None] = {Path("/"): None}

    def _find(self, path: Path) -> _Content | None:
        path = self.resolve(path)
        if path not in self.names:
            raise _error(FileNotFoundError, errno.ENOENT, path)
        found = self.names[path]
        assert not isinstance(found, str)
        return found

    def _file(self, path: Path) -> _Content:
        found = self._find(path)
        if found is None:
            raise _error(IsADirectoryError, errno.EISDIR, path)
        return found

    def _add(self, path: Path, what: _Content | str | None) -> None:
        if path in self.names:
            raise _error(FileExistsError, errno.EEXIST, path)
        if self._find(path.parent) is not None:
            raise _error(NotADirectoryError, errno.ENOTDIR, path.parent)
        self.names[path] = what

    def create(self, path: Path) -> _Writable:
        content = _Content()
        self._add(path, content)
        return _Writable(content)

    def append(self, path: Path) -> _Writable:
        return _Writable(self._file(path))

    def open(self, path: Path) -> _Readable:
        return _Readable(self._file(path))

    def status(self, path: Path) -> FileStatus | None:
        try:
            found = self._find(path)
        except OSError:
            return None
        return FileStatus((0, 0), 0, 0, is_file=False, is_folder=True) if found is None else found.status()

    def list(self, folder: Path) -> list[str]:
        self._find(folder)
        return [path.name for path in self.names if path.parent == self.resolve(folder) and path != path.parent]

    def is_link(self, path: Path) -> bool:
        return isinstance(self.names.get(path), str)

    def resolve(self, path: Path) -> Path:
        if path != path.parent:
            path = self.resolve(path.parent) / path.name
        target = self.names.get(path)
        return self.resolve(path.parent / target) if isinstance(target, str) else path

    def is_writable(self, folder: Path) -> bool:
        return self.status(folder) is not None

    def make_folder(self, path: Path) -> None:
        self._add(path, None)

    def make_folders(self, path: Path) -> None:
        if self.status(path) is None:
            self.make_folders(path.parent)
            self.make_folder(path)

    def link(self, path: Path, new: Path) -> None:
        self._add(new, self._file(path))

    def symlink(self, target: str, new: Path) -> None:
        self._add(new, target)

    def rename(self, path: Path, new: Path) -> None:
        self.names.pop(new, None)
        self._add(new, self.names.pop(path))

    def unlink(self, path: Path) -> None:
        self.names.pop(path, None)

    def remove_folder(self, path: Path) -> None:
        if self.list(path):
            raise _error(OSError, errno.ENOTEMPTY, path)
        del self.names[path]


def _error(kind: type[OSError], code: int, path: Path) -> OSError:
    return kind(code, os.strerror(code), str(path))
