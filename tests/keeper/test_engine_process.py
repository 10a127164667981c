"""An engine's process as the keeper sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from eventlm.config import Config
from eventlm.errors import ExitCode
from eventlm.keeper.engine_process import EngineProcess, KeeperError
from eventlm.keeper.protocol import VERSION, Prepare, encode
from eventlm.system.system import real_system

MODULE = "eventlm.cli.serve.engine"


async def spawn(version: int = VERSION) -> EngineProcess:
    prepare = Prepare(version=version, config=encode(Config()))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return await EngineProcess.spawn(real_system(), MODULE, [listening], prepare, lambda *_: None)


async def test_what_it_has_sent_before_its_end_is_known() -> None:
    engine = await spawn(VERSION + 1)
    await engine.prepared_or_gone()
    assert (engine.status, engine.prepared.done()) == (ExitCode.USAGE, False)
    assert engine.ending == "the server runs under a keeper of another version; stop the server and start it"


async def test_one_that_is_not_needed_is_killed_without_a_reason() -> None:
    engine = await spawn()
    await engine.prepared_or_gone()
    assert (engine.prepared.result().config, engine.is_serving) == (encode(Config()), False)
    await engine.kill()
    await engine.kill()
    assert engine.ending == "died (killed by SIGKILL)"


async def test_silence_before_it_serves_has_a_limit_of_its_own() -> None:
    engine = await spawn()
    await engine.prepared_or_gone()
    os.kill(engine.pid, signal.SIGSTOP)
    # However long it may be silent once it serves.
    await engine.watch(0.01, 1000, 0.05)
    assert engine.ending == "sent no heartbeat for 0 s"


async def test_one_that_may_be_silent_is_watched_to_its_end() -> None:
    engine = await spawn()
    await engine.prepared_or_gone()
    watching = asyncio.create_task(engine.watch(0.01, 0.01, 0))
    os.kill(engine.pid, signal.SIGTERM)
    await asyncio.sleep(0.05)
    # It is the keeper that decides when it leaves.
    assert not watching.done()
    os.kill(engine.pid, signal.SIGKILL)
    await watching
    assert engine.status == -signal.SIGKILL


async def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(KeeperError, match=r"cannot start an engine: .*No such file"):
        await spawn()
