from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from eventlm.system.child_pipe import LINGER_MS, ZmqChildPipe
from eventlm.system.threads import run_blocking
from tests.processes import PATIENCE_SECONDS


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_a_child_does_not_end_before_its_messages_are_sent(folder: Path) -> None:
    pipe = ZmqChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    sender = pipe.sender()
    sender.send(b"last")
    sender.close()
    begun = time.monotonic()
    pipe.close()
    # There is no parent: they are kept for as long as they may be.
    assert time.monotonic() - begun > 0.9e-3 * LINGER_MS


@pytest.mark.parametrize("seconds", [0, 40e-6, 0.0026])
def test_a_wait_without_a_message_takes_its_time(folder: Path, seconds: float) -> None:
    pipe = ZmqChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    begun = time.monotonic()
    assert not run_blocking(pipe.wait(seconds))
    assert time.monotonic() - begun >= seconds - 50e-6
    pipe.close()


def test_a_message_ends_a_wait_of_less_than_a_millisecond(folder: Path) -> None:
    pipe = ZmqChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
        engine.connect(f"ipc://{folder}/in")
        engine.send(b"a step")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not run_blocking(pipe.wait(0.0009)):
            assert time.monotonic() < deadline
        assert run_blocking(pipe.receive()) == [b"a step"]
    pipe.close()


def test_the_files_of_a_dead_parent_are_removed(folder: Path) -> None:
    pipe = ZmqChildPipe(f"ipc://{folder}/in", f"ipc://{folder}/out")
    (folder / "out").touch()
    pipe.remove()
    assert not folder.exists()
    pipe.remove()
    pipe.close()
