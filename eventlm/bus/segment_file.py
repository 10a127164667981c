"""One file of a trace while it is being written: locked, appended to, and never left with half a line for long; and
what may be written beside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple, Protocol

from eventlm.events.codec import chain, close_line
from eventlm.system.disk import Disk


class Extent(NamedTuple):
    """Whole lines from the first of a file on, their bytes, and the hash of the last of them."""

    num_lines: int
    num_bytes: int
    last_h: str


class SegmentFile:
    """Creates the file, mode 0600, and locks it for its life. Raises OSError if it is there or cannot be made.

    first_s: `s` of its header. previous_h: the hash before its first line. written: what it has. num_own_bytes: what
    was written since `begin`.

    What a failed sync leaves is unknown: lines that can be read now may be gone after a reboot. So those since the last
    sync are cut off, as if they had never been written, and the file is not synced again.
    """

    def __init__(self, disk: Disk, path: Path, *, first_s: int, previous_h: str = "") -> None:
        self.path = path
        self.first_s = first_s
        self.written = self._synced = Extent(0, 0, previous_h)
        self._num_begun_bytes = 0
        self._is_torn = False
        self._disk = disk
        self._file = disk.create(path)

    def continue_from(self, first_s: int, previous_h: str) -> None:
        """As of the constructor, where they are not known before the first line is."""
        self.first_s = first_s
        self.written = self._synced = Extent(0, 0, previous_h)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of events, without what the segment had to begin with."""
        return self.written.num_bytes - self._num_begun_bytes

    @property
    def is_synced(self) -> bool:
        """Whether all that was written has been synced."""
        return self._synced == self.written

    def begin(self) -> None:
        """All that the segment had to begin with is written."""
        self._num_begun_bytes = self.written.num_bytes

    def write(self, bodies: list[bytes]) -> OSError | None:
        """Append lines; what stopped it. Then the file is cut after the last whole one, now or by `truncate`."""
        hashes, lines = [], []
        before = self.written
        h = before.last_h
        for body in bodies:
            h = chain(h, body)
            hashes.append(h)
            lines.append(close_line(body, h))
        error = self._append(b"".join(lines))
        if error is None:
            self.written = Extent(before.num_lines + len(lines), before.num_bytes + sum(map(len, lines)), h)
            return None
        num_lines = num_bytes = 0
        while num_bytes + len(lines[num_lines]) <= self._num_appended:
            num_bytes += len(lines[num_lines])
            num_lines += 1
        last_h = hashes[num_lines - 1] if num_lines else before.last_h
        self._cut(Extent(before.num_lines + num_lines, before.num_bytes + num_bytes, last_h))
        return error

    def _append(self, content: bytes) -> OSError | None:
        self._num_appended = 0
        try:
            while self._num_appended < len(content):
                self._num_appended += self._file.write(content[self._num_appended :])
        except OSError as error:
            return error
        return None

    def sync(self) -> OSError | None:
        """Return once all lines survive a power failure, or what keeps them from it; then they are cut off."""
        if self.is_synced:
            return None
        try:
            self._file.sync()
        except OSError as error:
            self.cut_unsynced()
            return error
        self._synced = self.written
        return None

    def cut_unsynced(self) -> None:
        """Cut off the lines since the last sync, now or by `truncate`."""
        self._cut(self._synced)

    def _cut(self, extent: Extent) -> None:
        self.written = extent
        self._is_torn = True
        with contextlib.suppress(OSError):
            self.truncate()

    def truncate(self) -> None:
        """Cut off what a failed write or sync has left. Raises OSError if even that is impossible."""
        if self._is_torn:
            self._file.truncate(self.written.num_bytes)
            self._is_torn = False

    def close_as(self, path: Path) -> None:
        """Give the file its name as a closed segment, in addition to the present one where links can be made."""
        named = self._disk.status(path)
        # Named by an attempt whose next step failed.
        if named is not None and named.identity == self._file.status().identity:
            return
        try:
            self._disk.link(self.path, path)
        except FileExistsError:
            raise
        except OSError:
            self._disk.rename(self.path, path)

    def rename(self, path: Path) -> None:
        """Take another name, which may be that of another file."""
        self._disk.rename(self.path, path)
        self.path = path

    def remove(self) -> None:
        """Close the file and take its name away."""
        self.close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)

    def close(self) -> None:
        """Close the file and with it release the lock."""
        self._file.close()


class SideFile(Protocol):
    """What is written beside each segment, before the events that it is about. Its files begin and end with those of
    the trace. What the log forgets because of an error of another file, it may keep.
    """

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the present file."""
        ...

    def clear(self) -> None:
        """Forget what was taken and is not written."""
        ...

    def flush(self) -> OSError | None:
        """Write all that was taken; what kept that from happening."""
        ...

    def sync(self) -> OSError | None:
        """Return once all that was flushed survives a power failure, or what keeps it from that."""
        ...

    def start_file(self, first_s: int) -> None:
        """Make the file of the segment whose header is event `first_s`. The last one stays in use. Raises OSError."""
        ...

    def sync_next(self) -> OSError | None:
        """As `sync`, for the file that was made last."""
        ...

    def name_closed(self) -> None:
        """Give the file in use the name that it has once its segment is closed. Raises OSError."""
        ...

    def name_next(self) -> None:
        """Give the file that was made last the name of the one in use. Raises OSError."""
        ...

    def go_on(self) -> None:
        """The segment has begun: close the file before."""
        ...

    def go_back(self) -> None:
        """The segment could not be begun. A file that was renamed goes on under its closed name."""
        ...

    def close(self) -> None:
        """Cut off what a failed write has left, and close the file. Raises OSError."""
        ...

    def remove(self) -> None:
        """Close the file and take its name away."""
        ...
