"""The clocks of a world's host: a reboot sets them to 0, and a suspend stops all processes, and perhaps the clock."""

from __future__ import annotations

import pytest

from tests.world.machine.world import SECOND
from tests.world.plans.plan import Fault, Plan
from tests.world.run import Run, quiet
from tests.world.test_front_ends import plan


def _ran(what: Plan, *faults: Fault) -> Run:
    with quiet() as lines:
        run = Run(what._replace(faults=[*faults]), lines)
        run.run()
    return run


def test_after_a_reboot_the_clock_of_the_host_begins_at_0() -> None:
    run = _ran(plan(), Fault(0, SECOND, "reboot", 0))
    first, second = (server.process for server in run.servers)
    began_ns = run.world.now_ns - second.monotonic_ns
    assert first.monotonic_ns > second.monotonic_ns
    assert began_ns == first.ended_ns
    assert second.returncode == 0


@pytest.mark.parametrize("stops_clock", [True, False])
def test_a_suspend_of_the_host_costs_time_and_nothing_else(stops_clock: bool) -> None:
    detail = 15 if stops_clock else 90 + 15
    run = _ran(plan(num_tries=0), Fault(0, SECOND, "suspend", detail))
    process = run.server.process
    assert len(run.servers) == 1
    assert run.world.now_ns - process.monotonic_ns == 15 * SECOND * stops_clock
    for client in run.clients:
        assert client.reply.is_done
        assert b'"error"' not in client.reply.body
