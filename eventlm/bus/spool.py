"""The spool: what a log must not hold and a next engine needs, in frames beside it.

    DIR/<run>/spool-000000000000       mode 0600; named by the `s` of the header of the segment that it goes with

A file begins with all that lives when its segment begins, so the one before it is removed then. What a frame holds is
not known here. Each stands for itself: damage costs the frames that it touches.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from eventlm.bus.appended_file import AppendedFile
from eventlm.system.disk import Disk, sync_path

#: No text holds its first byte.
_MAGIC = b"\x89EVS"
#: Magic, length of the body, hash of the body.
_HEAD = struct.Struct("<4sI8s")
_PREFIX = "spool-"
_LOSS_NAME = "loss"


class Frames(NamedTuple):
    """What can be read of a spool's file: the bodies of its frames, and how many bytes are none."""

    bodies: list[bytes]
    num_bad_bytes: int


def spool_name(first_s: int) -> str:
    """The name of the file that goes with the segment whose header is event `first_s`."""
    return f"{_PREFIX}{first_s:012}"


class _Hash:
    """Hashes frames of one file of one run, so that no other's are taken for its own."""

    def __init__(self, path: Path) -> None:
        self._hash = blake2b(f"{path.parent.name}/{path.name}".encode(), digest_size=8)

    def digest(self, body: bytes) -> bytes:
        found = self._hash.copy()
        found.update(body)
        return found.digest()


class SpoolWriter:
    """The spool of a run, which follows the segments of its trace. Raises OSError.

    `prepare` comes before the first flush, and before each segment. It may be called in another thread than the rest.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self.folder = folder
        #: The first frames of the file that is to be made next; and of the first file, where its segment begins.
        self._base: Sequence[bytes] = ()
        self._first_s = 0
        self._file: _SpoolFile | None = None
        self._next: _SpoolFile | None = None
        self._bodies: list[bytes] = []
        #: Whether a power failure leaves the names that lead to the present file.
        self._is_named = False

    def prepare(self, first_s: int, base: Sequence[bytes]) -> None:
        """Take the first frames of the next file, in place of those of one that could not be made. first_s: the header
        of its segment.
        """
        self._first_s, self._base = first_s, base

    @property
    def path(self) -> Path:
        """The present file. There is none before the first flush."""
        assert self._file is not None
        return self._file.path

    @property
    def has_file(self) -> bool:
        """Whether there is a present file."""
        return self._file is not None

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the present file after its base."""
        return self._file.num_own_bytes if self._file is not None else 0

    def append(self, bodies: Sequence[bytes]) -> None:
        """Take frames, to be written by the next `flush`."""
        self._bodies += bodies

    def clear(self) -> None:
        """Forget what was taken and is not written."""
        self._bodies.clear()

    def flush(self) -> OSError | None:
        """Write all that was taken; what kept that from happening."""
        bodies, self._bodies = self._bodies, []
        try:
            if self._file is None:
                self._disk.make_folders(self.folder)
                self._file = self._create(self._first_s)
        except OSError as error:
            return error
        return self._file.write(bodies)

    def _create(self, first_s: int) -> _SpoolFile:
        path = self.folder / spool_name(first_s)
        # Of an attempt to begin this segment that failed.
        self._disk.unlink(path)
        base, self._base = self._base, ()
        return _SpoolFile(self._disk, path, base)

    @property
    def is_synced(self) -> bool:
        """Whether all that was flushed has been synced."""
        return self._file is None or self._file.is_synced

    def sync(self) -> OSError | None:
        """Return once all that was flushed survives a power failure, or what keeps it from that."""
        if self._file is None:
            return None
        error = self._file.sync()
        return self._sync_names() if error is None and not self._is_named else error

    def _sync_names(self) -> OSError | None:
        """The first time, those that lead to the folder, too."""
        try:
            if self._is_named:
                self._disk.sync_folder(self.folder)
            else:
                sync_path(self._disk, self.folder)
        except OSError as error:
            return error
        self._is_named = True
        return None

    def start_file(self, first_s: int) -> None:
        """Make the file of the segment whose header is event `first_s`. The last one stays in use."""
        self._next = self._create(first_s)

    def sync_next(self) -> OSError | None:
        """As `sync`, for the file that was made last, and its name."""
        assert self._next is not None
        error = self._next.sync()
        return self._sync_names() if error is None else error

    def name_closed(self) -> None:
        """Each file has its own name from its beginning."""

    def name_next(self) -> None:
        """As `name_closed`."""

    def go_on(self) -> None:
        """The segment has begun: remove the file before."""
        assert self._next is not None
        if self._file is not None:
            self._file.close()
        self._file, self._next = self._next, None
        _remove(self._disk, self.folder, self._is_old)

    def _is_old(self, name: str) -> bool:
        return name == _LOSS_NAME or (name.startswith(_PREFIX) and name != self.path.name)

    def note_loss(self) -> None:
        """Outputs leave although they cannot be written, until a segment begins anew with all that lives."""
        with contextlib.suppress(OSError):
            self._disk.create(self.folder / _LOSS_NAME).close()

    def go_back(self) -> None:
        """The segment could not be begun."""
        if self._next is not None:
            self._next.remove()
            self._next = None

    def close(self) -> None:
        """Close the file, and leave it to a next engine."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Close the file and remove the run's folder."""
        self.close()
        remove_spool(self._disk, self.folder)


class _SpoolFile(AppendedFile):
    """Raises OSError if it cannot be made, or its base cannot be written."""

    def __init__(self, disk: Disk, path: Path, base: Sequence[bytes]) -> None:
        super().__init__(disk, path)
        self._hash = _Hash(path)
        error = self.write(base)
        if error is not None:
            self.remove()
            raise error
        self._num_base_bytes = self.num_bytes

    @property
    def num_own_bytes(self) -> int:
        return self.num_bytes - self._num_base_bytes

    def write(self, bodies: Sequence[bytes]) -> OSError | None:
        frames = [_HEAD.pack(_MAGIC, len(body), self._hash.digest(body)) + body for body in bodies]
        return self.append(frames).error if frames else None


def read_frames(disk: Disk, path: Path) -> Frames:
    """The frames of a file, which may be damaged or torn. Raises OSError if it cannot be read."""
    content, hashed = disk.read(path), _Hash(path)
    bodies, position, num_bad_bytes = [], 0, 0
    while position < len(content):
        end = position + _HEAD.size
        if end <= len(content):
            magic, length, digest = _HEAD.unpack_from(content, position)
            body = content[end : end + length]
            if magic == _MAGIC and len(body) == length and hashed.digest(body) == digest:
                bodies.append(body)
                position = end + length
                continue
        found = content.find(_MAGIC, position + 1)
        following = found if found >= 0 else len(content)
        num_bad_bytes += following - position
        position = following
    return Frames(bodies, num_bad_bytes)


def first_frame(disk: Disk, folder: Path) -> bytes:
    """The first frame of a run's spool; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        for name in sorted(disk.list(folder)):
            path = folder / name
            with contextlib.closing(disk.open(path)) as file:
                head = file.read(_HEAD.size)
                if not name.startswith(_PREFIX) or len(head) < _HEAD.size:
                    continue
                magic, length, digest = _HEAD.unpack(head)
                body = file.read(length) if magic == _MAGIC else b""
                if body and _Hash(path).digest(body) == digest:
                    return body
    return b""


def has_lost(disk: Disk, folder: Path) -> bool:
    """Whether outputs have left that were not written."""
    return disk.status(folder / _LOSS_NAME) is not None


def remove_spool(disk: Disk, folder: Path) -> None:
    """Remove the spool of a run. What cannot be removed stays."""
    _remove(disk, folder, lambda name: True)
    with contextlib.suppress(OSError):
        disk.remove_folder(folder)


def _remove(disk: Disk, folder: Path, is_old: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError):
        for name in filter(is_old, disk.list(folder)):
            disk.unlink(folder / name)
