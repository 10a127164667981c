"""Seeds of the whole server, in virtual time."""

from __future__ import annotations

import gc

import pytest

from eventlm.cli.logging_setup import configure_logging
from eventlm.engine import inference_engine
from tests.world.fresh_process import printed_with_other_hashes
from tests.world.plans.plan import draw_plan
from tests.world.run import quiet, run_plan

_DIGEST = """
from tests.world.plans.plan import draw_plan
from tests.world.run import run_plan
print(run_plan(draw_plan({})).digest)
"""


@pytest.mark.parametrize("seed", range(100))
def test_seeds_come_to_rest_with_every_invariant(seed: int) -> None:
    ran = run_plan(draw_plan(seed))
    assert ran.checks["the server ends in order"] == 1
    assert ran.num_events > 0


def test_a_seed_gives_the_same_bytes_in_another_process() -> None:
    assert printed_with_other_hashes(_DIGEST.format(4)) == {run_plan(draw_plan(4)).digest}


def test_leaving_a_fault_out_moves_no_other_draw() -> None:
    plan = draw_plan(4)
    assert len(plan.faults) > 2
    fewer = plan.without(set(), {plan.faults[0].number})
    assert fewer.faults == plan.faults[1:]
    assert run_plan(fewer).num_requests == len(plan.visits)


def test_a_seed_does_not_hear_what_another_one_has_left() -> None:
    class Left:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            inference_engine.log.error("from another seed")

    gc.disable()
    Left()
    with quiet() as lines:
        pass
    assert lines == []


def test_a_seed_hears_loggers_that_a_command_has_used_before() -> None:
    configure_logging()
    inference_engine.log.warning("to stderr")
    with quiet() as lines:
        inference_engine.log.warning("to the seed")
    assert [line["event"] for line in lines] == ["to the seed"]
