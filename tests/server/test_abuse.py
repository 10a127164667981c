"""A few of each of the clients that mean no good: everyone is answered or cut off, and nothing is left of them.

`python benchmarks/server/abuse.py` is the same with thousands against a real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.attacks import ATTACKS, CLOSED, HUNG, LEFT, Target, cancel_burst, run_attack
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import RunningServer, assert_serves

NUM_CLIENTS = 36
#: What a client may be told. A 500 is none of it.
ANSWERS = {"200", "400", "408", "413", "431", CLOSED, LEFT}


@pytest.fixture
def target(start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> tuple[RunningServer, Target]:
    monkeypatch.setattr("eventlm.server.http.connection.LINGER_SECONDS", 0.5)
    server = start_server(
        header_timeout_seconds=1, body_timeout_seconds=1, idle_timeout_seconds=1, write_timeout_seconds=1
    )
    server.engine.step_seconds = 0.01
    return server, Target(server.host, server.port, "test", max_tokens=200, patience_seconds=PATIENCE_SECONDS)


def assert_nothing_is_left(server: RunningServer) -> None:
    wait_until(lambda: server._server.num_connections == 0)
    wait_until(lambda: server.context.num_running == 0)
    assert not server.context._live
    server.engine.script_end = "eos"
    assert_serves(server)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(target: tuple[RunningServer, Target], name: str) -> None:
    server, where = target
    server.engine.script_end = None if name in ("slow reader", "vanish") else "eos"
    found = asyncio.run(run_attack(ATTACKS[name], where, NUM_CLIENTS))
    assert found.total() == NUM_CLIENTS
    assert found[HUNG] == 0
    assert found.keys() <= ANSWERS, found
    assert_nothing_is_left(server)


def test_a_burst_of_cancels(server: RunningServer) -> None:
    server.engine.step_seconds = 0.01
    server.engine.script_end = None
    server.engine.max_model_len = 1_000_000
    where = Target(server.host, server.port, "test", max_tokens=900_000, patience_seconds=PATIENCE_SECONDS)
    found = asyncio.run(cancel_burst(where, 100))
    assert found == {"200": 100}
    wait_until(lambda: len(server.engine.cancelled) == 100)
    assert_nothing_is_left(server)
