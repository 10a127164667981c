"""Files and folders, as far as traces need them."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

READ_BUFFER_BYTES = 256 * 1024


class FileStatus(NamedTuple):
    """identity: the same for all names of a file. modified_ns: Unix time. mode: who may read and write it."""

    identity: tuple[int, int]
    num_bytes: int
    modified_ns: int
    is_file: bool
    is_folder: bool
    mode: int


class ReadableFile(Protocol):
    """A file open for reading, in binary."""

    def read(self, num_bytes: int, /) -> bytes: ...

    def readline(self, max_bytes: int, /) -> bytes: ...

    def seek(self, byte_offset: int, /) -> int: ...

    def tell(self) -> int: ...

    def status(self) -> FileStatus: ...

    def is_locked(self) -> bool:
        """Whether a writer has it open."""
        ...

    def close(self) -> None: ...


class WritableFile(Protocol):
    """A file open for appending, and locked until it is closed."""

    def write(self, content: bytes) -> int:
        """How many bytes were written, which may be fewer. They survive the death of this process."""
        ...

    def truncate(self, num_bytes: int) -> None: ...

    def sync(self) -> None:
        """Return once the content survives a power failure. After an error, another call would prove nothing: the
        system has forgotten what it could not bring to the disk.
        """
        ...

    def status(self) -> FileStatus: ...

    def close(self) -> None:
        """A second call does nothing."""
        ...


class Disk(Protocol):
    """A file system. All methods raise OSError, except those that say otherwise."""

    def create(self, path: Path) -> WritableFile:
        """A new file of mode 0600. Raises FileExistsError."""
        ...

    def append(self, path: Path) -> WritableFile:
        """An existing file. Raises BlockingIOError if another process has locked it."""
        ...

    def open(self, path: Path) -> ReadableFile: ...

    def read(self, path: Path) -> bytes:
        """The whole content of a file. If the path is a named pipe, block until its writer closes it."""
        ...

    def status(self, path: Path) -> FileStatus | None:
        """Follows links. None if there is nothing that can be looked at; raises nothing."""
        ...

    def list(self, folder: Path) -> list[str]:
        """Names, in any order."""
        ...

    def is_link(self, path: Path) -> bool:
        """Whether it is a symbolic link. Raises nothing."""
        ...

    def resolve(self, path: Path) -> Path:
        """The absolute path without symbolic links."""
        ...

    def is_writable(self, folder: Path) -> bool:
        """Whether files can be made in it. Raises nothing."""
        ...

    def is_private(self, folder: Path) -> bool:
        """Whether it is this user's, and nobody else may look into it."""
        ...

    def make_folder(self, path: Path) -> None:
        """A new folder of mode 0700. Raises FileExistsError."""
        ...

    def make_folders(self, path: Path) -> None:
        """A folder of mode 0700 and its parents, where they do not exist."""
        ...

    def link(self, path: Path, new: Path) -> None:
        """Give a file a second name."""
        ...

    def symlink(self, target: str, new: Path) -> None: ...

    def rename(self, path: Path, new: Path) -> None:
        """Replaces a file that has the new name."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name of a file. Does nothing if there is none."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Raises OSError if it is not empty."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return once the names in a folder survive a power failure, if its file system can promise that."""
        ...


def sync_path(disk: Disk, folder: Path) -> None:
    """Return once the names in a folder survive a power failure, and its own and those of the folders above it."""
    for each in (folder, *folder.absolute().parents):
        disk.sync_folder(each)


class SystemDisk:
    """The host's own. Methods are described at Disk."""

    def create(self, path: Path) -> WritableFile:
        while True:
            # Waits for the lock: a reader that probes it holds it for a moment. One that cleans up may have
            # removed the file before it was locked.
            file = _WritableFile(path, os.O_CREAT | os.O_EXCL, fcntl.LOCK_EX)
            if file.has_name():
                return file
            file.close()

    def append(self, path: Path) -> WritableFile:
        return _WritableFile(path, 0, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def open(self, path: Path) -> ReadableFile:
        return _ReadableFile(path)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def status(self, path: Path) -> FileStatus | None:
        try:
            return _status(os.stat(path))
        except OSError:
            return None

    def list(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def resolve(self, path: Path) -> Path:
        return path.resolve()

    def is_writable(self, folder: Path) -> bool:
        return os.access(folder, os.W_OK | os.X_OK)

    def is_private(self, folder: Path) -> bool:
        found = os.stat(folder)
        return found.st_uid == os.geteuid() and not found.st_mode & 0o077

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def make_folders(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def link(self, path: Path, new: Path) -> None:
        os.link(path, new)

    def symlink(self, target: str, new: Path) -> None:
        os.symlink(target, new)

    def rename(self, path: Path, new: Path) -> None:
        os.rename(path, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            # Names can be made in a folder that cannot be read, but not synced.
            return
        try:
            os.fsync(fd)
        except OSError as error:
            # Of a file system that knows no such call, as some over a network.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)


class _ReadableFile(io.BufferedReader):
    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, opener=_open_at_once), READ_BUFFER_BYTES)

    def status(self) -> FileStatus:
        return _status(os.fstat(self.fileno()))

    def is_locked(self) -> bool:
        try:
            fcntl.flock(self, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self, fcntl.LOCK_UN)
        return False


class _WritableFile:
    def __init__(self, path: Path, flags: int, lock: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(self._fd, lock)
        except OSError:
            os.close(self._fd)
            raise

    def has_name(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def write(self, content: bytes) -> int:
        return os.write(self._fd, content)

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def status(self) -> FileStatus:
        return _status(os.fstat(self._fd))

    def close(self) -> None:
        if self._fd >= 0:
            # Closing is not enough: a fork of this process has the file open too, and may live on.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def _open_at_once(path: str, flags: int) -> int:
    """An opener that does not wait at a named pipe for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(
        (found.st_dev, found.st_ino),
        found.st_size,
        found.st_mtime_ns,
        stat.S_ISREG(found.st_mode),
        stat.S_ISDIR(found.st_mode),
        stat.S_IMODE(found.st_mode),
    )


#: For what reads a user's own files.
SYSTEM_DISK = SystemDisk()
