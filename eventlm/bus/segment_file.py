"""One file of a trace while it is being written: locked, appended to, and never left with half a line for long."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from eventlm.events.codec import chain, close_line
from eventlm.system.disk import Disk


class Written(NamedTuple):
    """What a write came to: whole lines, their bytes, the hash of the last of them, and what stopped it."""

    num_lines: int
    num_bytes: int
    previous_h: str
    error: OSError | None


class SegmentFile:
    """Creates the file, mode 0600, and locks it for its life. Raises OSError if it is there or cannot be made.

    first_s: `s` of its header. num_own_bytes: what was written since `begin`.
    """

    def __init__(self, disk: Disk, path: Path, *, first_s: int) -> None:
        self.path = path
        self.first_s = first_s
        self._num_bytes = 0
        self._num_begun_bytes = 0
        self._is_torn = False
        self._disk = disk
        self._file = disk.create(path)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of events, without what the segment had to begin with."""
        return self._num_bytes - self._num_begun_bytes

    def begin(self) -> None:
        """All that the segment had to begin with is written."""
        self._num_begun_bytes = self._num_bytes

    def write(self, bodies: list[bytes], previous_h: str) -> Written:
        """Append lines. If that fails, the file is cut after the last whole one, now or by `truncate`."""
        hashes, lines = [], []
        h = previous_h
        for body in bodies:
            h = chain(h, body)
            hashes.append(h)
            lines.append(close_line(body, h))
        error = self._append(b"".join(lines))
        if error is None:
            num_bytes = sum(map(len, lines))
            self._num_bytes += num_bytes
            return Written(len(lines), num_bytes, h, None)
        num_lines = num_bytes = 0
        while num_bytes + len(lines[num_lines]) <= self._num_appended:
            num_bytes += len(lines[num_lines])
            num_lines += 1
        self._num_bytes += num_bytes
        self._is_torn = True
        with contextlib.suppress(OSError):
            self.truncate()
        return Written(num_lines, num_bytes, hashes[num_lines - 1] if num_lines else previous_h, error)

    def _append(self, content: bytes) -> OSError | None:
        self._num_appended = 0
        try:
            while self._num_appended < len(content):
                self._num_appended += self._file.write(content[self._num_appended :])
        except OSError as error:
            return error
        return None

    def truncate(self) -> None:
        """Cut off what a failed write has left of its last line. Raises OSError if even that is impossible."""
        if self._is_torn:
            self._file.truncate(self._num_bytes)
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
