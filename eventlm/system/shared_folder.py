"""What processes of one host share: a folder in memory, and a board on which each notes the step that it has in hand.

The board outlives a process that is killed, so it says what that was doing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Protocol

_MEMORY = Path("/dev/shm")
#: The names of such folders begin so, and of nothing else: a temporary folder may be among those that are looked at.
PREFIX = "eventlm-ranks-"
#: Put before that until the folder is locked, which takes no time.
_UNLOCKED = "new-"
#: After so long, one that still has it was left.
_OLD_SECONDS = 60
_BOARD = "steps"
_STEP = struct.Struct("q")
#: On the board: nothing is in hand.
NO_STEP = -1


class Board(Protocol):
    """A number for each of several processes: the step that it has in hand, or had when it died."""

    def write(self, number: int, step: int) -> None:
        """Note the step that a process has in hand."""
        ...

    def read(self, number: int) -> int:
        """That step; `NO_STEP` if there is none."""
        ...


class Folder(Protocol):
    """A folder that processes of one host share."""

    @property
    def path(self) -> Path: ...

    def remove(self) -> None:
        """Remove it and what is in it. Harmless when called twice."""
        ...


class SharedFolders(Protocol):
    """Makes folders that processes share."""

    @property
    def lasting(self) -> Path:
        """This user's folder in the host's memory, which outlives all processes. It need not exist."""
        ...

    def make(self) -> Folder:
        """A new one. Raises OSError."""
        ...

    def board(self, folder: str | Path, *, size: int | None = None) -> Board:
        """The board in one. size: of how many processes; the board is made. None: it is there. Raises OSError."""
        ...

    def remove(self, folder: str | Path) -> None:
        """Remove one whose maker cannot. What others have mapped of it stays. Harmless if it is gone."""
        ...


class SystemSharedFolders:
    """In the host's memory."""

    @property
    def lasting(self) -> Path:
        """As SharedFolders says."""
        return _MEMORY / f"eventlm-{os.getuid()}"

    def make(self) -> SharedFolder:
        """As SharedFolders says."""
        return SharedFolder()

    def board(self, folder: str | Path, *, size: int | None = None) -> StepBoard:
        """As SharedFolders says."""
        return StepBoard(folder, size=size)

    def remove(self, folder: str | Path) -> None:
        """As SharedFolders says."""
        _remove_folder(folder)


class SharedFolder:
    """A new folder, in memory if the host has a file system for that, which no other user can enter. It is locked as
    long as its maker lives and keeps it. Those that makers have left when they were killed are removed.

    Raises OSError.
    """

    def __init__(self) -> None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        remove_left_folders(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED + PREFIX, dir=parent))
        self._lock = _open_folder(unlocked)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Until here no sweep takes it for one that was left.
        self.path = unlocked.rename(parent / unlocked.name.removeprefix(_UNLOCKED))

    def remove(self) -> None:
        """Remove it and what is in it. Harmless when called twice."""
        if self._lock >= 0:
            _remove_folder(self.path)
            os.close(self._lock)
            self._lock = -1


class StepBoard:
    """A number for each of several processes, in a file of their shared folder that all of them map.

    size: of how many; the board is made. None: it is there. Raises OSError.
    """

    def __init__(self, folder: str | Path, *, size: int | None = None) -> None:
        path = Path(folder) / _BOARD
        if size is not None:
            path.write_bytes(_STEP.pack(NO_STEP) * size)
        with path.open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), 0)

    def write(self, number: int, step: int) -> None:
        """Note the step that a process has in hand."""
        _STEP.pack_into(self._board, number * _STEP.size, step)

    def read(self, number: int) -> int:
        """The step that a process has in hand, or had when it died; `NO_STEP` if none."""
        step: int = _STEP.unpack_from(self._board, number * _STEP.size)[0]
        return step

    def close(self) -> None:
        """Unmap it. Harmless when called twice."""
        self._board.close()


def remove_left_folders(parent: Path) -> None:
    """Remove this user's shared folders in `parent` whose makers were killed."""
    for path in [*parent.glob(f"{PREFIX}*"), *parent.glob(f"{_UNLOCKED}{PREFIX}*")]:
        # Most folders of others cannot be opened, and what lives is locked.
        with contextlib.suppress(OSError):
            lock = _open_folder(path)
            try:
                found = os.fstat(lock)
                is_new = path.name.startswith(_UNLOCKED) and time.time() - found.st_mtime < _OLD_SECONDS
                if found.st_uid == os.geteuid() and not is_new:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_folder(path)
            finally:
                os.close(lock)


def _open_folder(path: Path) -> int:
    """Raises OSError, also for what only leads to a folder: where anybody may write, others may have put it there."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove_folder(path: str | Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
