"""An operator, who edits files of the host while its servers run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eventlm.server.batches.results import write_all
from tests.world.machine.world import World


class Operator:
    """Writes files as far as the disk permits, and ignores errors."""

    def __init__(self, world: World) -> None:
        self._disk = world.disk.of("operator")

    def write(self, path: Path, content: bytes, *, replaces: bool = False) -> None:
        """Write a file. replaces: write it under another name, and rename it once it is complete."""
        written = path.with_suffix(".new") if replaces else path
        with contextlib.suppress(OSError):
            self._disk.make_folders(path.parent)
            if replaces:
                self._disk.unlink(written)
            file = self._disk.append(written) if self._disk.status(written) is not None else self._disk.create(written)
            try:
                file.truncate(0)
                write_all(file, content)
                if replaces:
                    file.sync()
            finally:
                file.close()
            if replaces:
                self._disk.rename(written, path)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        with contextlib.suppress(OSError):
            self._disk.unlink(path)
