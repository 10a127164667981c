from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.system.child_pipe import LINGER_MS, ChildPipe


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_a_child_does_not_end_before_its_messages_are_sent(folder: Path) -> None:
    pipe = ChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    sender = pipe.sender()
    sender.send(b"last")
    sender.close()
    begun = time.monotonic()
    pipe.close()
    # There is no parent: they are kept for as long as they may be.
    assert time.monotonic() - begun > 0.9e-3 * LINGER_MS


def test_the_files_of_a_dead_parent_are_removed(folder: Path) -> None:
    pipe = ChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    (folder / "out").touch()
    pipe.remove()
    assert not folder.exists()
    pipe.remove()
    pipe.close()
