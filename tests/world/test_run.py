"""Seeds of the whole server, in virtual time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import PATIENCE_SECONDS
from tests.world.plans.plan import draw_plan
from tests.world.run import run_plan

_DIGEST = """
from tests.world.plans.plan import draw_plan
from tests.world.run import run_plan
print(run_plan(draw_plan({})).digest)
"""


@pytest.mark.parametrize("seed", range(20))
def test_seeds_come_to_rest_with_every_invariant(seed: int) -> None:
    ran = run_plan(draw_plan(seed))
    assert ran.checks["the server ends in order"] == 1
    assert ran.num_events > 0


def test_a_seed_gives_the_same_bytes_in_another_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST.format(4)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {run_plan(draw_plan(4)).digest}


def test_leaving_a_fault_out_moves_no_other_draw() -> None:
    plan = draw_plan(4)
    assert len(plan.faults) > 2
    fewer = plan.without(set(), {plan.faults[0].number})
    assert fewer.faults == plan.faults[1:]
    assert run_plan(fewer).num_requests == len(plan.visits)
