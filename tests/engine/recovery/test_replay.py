"""A log is followed as far as it is what the core decides and as its records reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from eventlm.engine.recovery.replay import LOST_TOKEN, lost_request
from eventlm.events import Arrived
from eventlm.scheduling_params import SchedulingParams
from tests.engine.recovery.crashes import CrashingSimulation, Death, dead_engine


@pytest.fixture
def dead(tmp_path: Path) -> CrashingSimulation:
    """An engine that died at its 20th drain."""
    return dead_engine(tmp_path, Death(20, delivered=True))


def test_the_state_is_that_of_the_dead_engine(dead: CrashingSimulation) -> None:
    found = dead.recover()
    assert found is not None
    before, after = dead.engine_core, found
    assert after.core.snapshot() == before.core.snapshot()
    assert after.core.digests() == before.core.digests()
    assert [*after.live.requests] == [*before.live.requests]
    kept = [[live.keep(request) for request in live.requests] for live in (before.live, after.live)]
    assert kept[0] == kept[1]
    assert after.live.keep_names() == before.live.keep_names()
    assert after.live.keep_workers() == before.live.keep_workers()
    # These simulations measure nothing, so their outputs have no rows.
    replies = [dead.registry.keep(before.live), after.followers.registry.keep(after.live)]
    lengths = [[None if reply.outputs is None else len(reply.outputs) for reply in kept] for kept in replies]
    assert lengths[0] == lengths[1]
    assert sum(filter(None, lengths[0])) > 20
    kept_replies = [[structs.replace(reply, outputs=None) for reply in kept] for kept in replies]
    assert kept_replies[0] == kept_replies[1]


def test_an_engine_that_would_decide_otherwise_goes_on_from_before_that(
    dead: CrashingSimulation,
) -> None:
    simulation = dead
    core = simulation.machine.core
    assert core.max_num_seqs > 1
    simulation.machine = simulation.machine._replace(core=structs.replace(core, max_num_seqs=1))
    found = simulation.recover()
    assert found is not None
    assert "is not what is decided now" in found.cut
    assert found.core.next_seq < simulation.engine_core.core.next_seq


def test_what_stands_for_a_lost_request_has_its_lengths() -> None:
    fact = Arrived(prompt_tokens=3, n=2, max_tokens=5, scheduling=SchedulingParams(model="m"))
    request = lost_request(fact)
    assert (request.prompt_token_ids, request.n, request.max_tokens) == ([LOST_TOKEN] * 3, 2, 5)
