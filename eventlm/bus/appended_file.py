"""A file to which whole pieces are appended: never left with a part of one for long."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eventlm.system.disk import Disk, WritableFile


class Appended(NamedTuple):
    """What appending came to: how many pieces are whole, and what kept the others from being written."""

    num_pieces: int
    error: OSError | None


class AppendedFile:
    """Creates the file, mode 0600, and locks it for its life. Raises OSError if it is there or cannot be made.

    file: one that is there, open and locked, of which so many bytes stay.

    What a failed sync leaves is unknown: pieces that can be read now may be gone after a reboot. So those since the
    last sync are cut off, as if they had never been written, and the file is not synced again.
    """

    def __init__(self, disk: Disk, path: Path, *, file: WritableFile | None = None, num_bytes: int = 0) -> None:
        self.path = path
        self.num_bytes = self._num_synced_bytes = num_bytes
        self._is_torn = False
        self._disk = disk
        self._file = file or disk.create(path)

    @property
    def is_synced(self) -> bool:
        """Whether all that was appended has been synced."""
        return self._num_synced_bytes == self.num_bytes

    def append(self, pieces: Sequence[bytes]) -> Appended:
        """Append pieces. If that fails, the file is cut after the last whole one, now or by `truncate`."""
        content, num_appended = b"".join(pieces), 0
        try:
            while num_appended < len(content):
                num_appended += self._file.write(content[num_appended:])
        except OSError as error:
            num_whole = num_bytes = 0
            while num_bytes + len(pieces[num_whole]) <= num_appended:
                num_bytes += len(pieces[num_whole])
                num_whole += 1
            self._cut(self.num_bytes + num_bytes)
            return Appended(num_whole, error)
        self.num_bytes += len(content)
        return Appended(len(pieces), None)

    def sync(self) -> OSError | None:
        """Return once all pieces survive a power failure, or what keeps them from it; then they are cut off."""
        if self.is_synced:
            return None
        try:
            self._file.sync()
        except OSError as error:
            self.cut_unsynced()
            return error
        self._num_synced_bytes = self.num_bytes
        return None

    def cut_unsynced(self) -> None:
        """Cut off the pieces since the last sync, now or by `truncate`."""
        self._cut(self._num_synced_bytes)

    def _cut(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._is_torn = True
        with contextlib.suppress(OSError):
            self.truncate()

    def truncate(self) -> None:
        """Cut off what a failed write or sync has left. Raises OSError if even that is impossible."""
        if self._is_torn:
            self._file.truncate(self.num_bytes)
            self._is_torn = False

    def remove(self) -> None:
        """Close the file and take its name away."""
        self.close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)

    def close(self) -> None:
        """Close the file and with it release the lock."""
        self._file.close()
