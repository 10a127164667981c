"""One file of a trace while it is being written: locked, appended to, and never left with half a line for long; and
what may be written beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from eventlm.bus.appended_file import AppendedFile
from eventlm.events.codec import chain, close_line
from eventlm.system.disk import Disk, WritableFile


class Extent(NamedTuple):
    """Whole lines from the first of a file on, their bytes, and the hash of the last of them."""

    num_lines: int
    num_bytes: int
    last_h: str


class SegmentFile(AppendedFile):
    """A file of lines that is locked while it is written.

    first_s: `s` of its header. previous_h: the hash before its first line. written: what it has. num_own_bytes: what
    was written since `begin`. file: one that is there, open and locked, of which what is `written` stays.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        first_s: int,
        previous_h: str = "",
        file: WritableFile | None = None,
        written: Extent | None = None,
    ) -> None:
        self.written = self._synced = written or Extent(0, 0, previous_h)
        super().__init__(disk, path, file=file, num_bytes=self.written.num_bytes)
        self.first_s = first_s
        self._num_begun_bytes = 0

    def continue_from(self, first_s: int, previous_h: str) -> None:
        """As of the constructor, where they are not known before the first line is."""
        self.first_s = first_s
        self.written = self._synced = Extent(0, 0, previous_h)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of events, without what the segment had to begin with."""
        return self.num_bytes - self._num_begun_bytes

    def begin(self) -> None:
        """All that the segment had to begin with is written."""
        self._num_begun_bytes = self.num_bytes

    def write(self, bodies: list[bytes]) -> OSError | None:
        """Append lines; what stopped it. Then the file is cut after the last whole one, now or by `truncate`."""
        hashes, lines = [self.written.last_h], []
        for body in bodies:
            h = chain(hashes[-1], body)
            hashes.append(h)
            lines.append(close_line(body, h))
        num_lines, error = self.append(lines)
        self.written = Extent(self.written.num_lines + num_lines, self.num_bytes, hashes[num_lines])
        return error

    def sync(self) -> OSError | None:
        """As AppendedFile.sync."""
        error = super().sync()
        if error is None:
            self._synced = self.written
        return error

    def cut_unsynced(self) -> None:
        """As AppendedFile.cut_unsynced."""
        super().cut_unsynced()
        self.written = self._synced

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
