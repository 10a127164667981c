"""A real disk that fails for a while."""

from __future__ import annotations

import errno
from pathlib import Path

from eventlm.system.disk import SystemDisk


class FailingDisk(SystemDisk):
    """The next `num_left` reads of whole files fail."""

    def __init__(self, num_left: int = 0) -> None:
        self.num_left = num_left

    def read(self, path: Path) -> bytes:
        """As Disk.read."""
        self.num_left -= 1
        if self.num_left >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path)
