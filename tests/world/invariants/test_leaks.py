"""A defect that leaves something in a process is found at rest, each kind by an invariant of its own."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.config import ParallelConfig
from tests.world.invariants.checks import BrokenInvariant
from tests.world.machine.world import SECOND
from tests.world.plans.plan import Fault
from tests.world.planted import PLANTED
from tests.world.run import run_plan
from tests.world.test_front_ends import plan

_LEAKS = {
    "leaked task": "no task is left",
    "leaked timer": "no timer is left",
    "leaked file": "no file is left open",
    "leaked thread": "no thread is left",
    "leaked child": "no child is left",
    "leaked folder": "no shared folder is left",
}


@pytest.mark.parametrize("name", _LEAKS)
def test_each_kind_of_leak_is_found_at_rest(name: str) -> None:
    drawn = plan()
    config = structs.replace(
        drawn.config,
        worker=structs.replace(drawn.config.worker, heartbeat_timeout_seconds=20),
        parallel=ParallelConfig(tensor_parallel_size=2),
        record=structs.replace(drawn.config.record, record_lag="gap", record_segment="8KiB"),
    )
    # A worker that is frozen for longer than its heartbeat timeout is considered lost.
    freeze = Fault(0, SECOND, "freeze worker", 39)
    with PLANTED[name].plant(), pytest.raises(BrokenInvariant) as found:
        run_plan(drawn._replace(config=config, faults=[freeze], seconds=50))
    assert found.value.name == _LEAKS[name]
