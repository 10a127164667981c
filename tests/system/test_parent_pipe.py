from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from eventlm.system.parent_pipe import PipeError
from eventlm.system.pipes import SystemPipes
from eventlm.system.threads import run_blocking

PATIENCE_SECONDS = 60


async def test_messages_go_both_ways_in_their_order() -> None:
    parent = SystemPipes().open()
    folder = os.path.dirname(parent.addresses[0].removeprefix("ipc://"))
    # They are kept until the child has begun.
    parent.send(b"one")
    parent.send(b"two", b"frames")
    child = SystemPipes().open_child(*parent.addresses)
    sender = child.sender()
    assert run_blocking(child.wait(PATIENCE_SECONDS))
    assert [run_blocking(child.receive()) for _ in range(2)] == [[b"one"], [b"two", b"frames"]]
    assert not run_blocking(child.wait(0))
    sender.send(b"three")
    sender.send(b"four")
    assert [await parent.receive(), await parent.receive()] == [b"three", b"four"]
    sender.close()
    child.close()
    # Nobody takes it, and nobody waits.
    parent.send(b"five")
    parent.close()
    parent.close()
    assert not os.access(folder, os.F_OK)


def test_a_pipe_that_cannot_be_opened_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(PipeError, match="too long"):
        SystemPipes().open()
    assert list(folder.iterdir()) == []


def test_a_pair_is_connected() -> None:
    ours, theirs = SystemPipes().pair()
    with ours, theirs:
        ours.sendall(b"content")
        assert theirs.recv(100) == b"content"
