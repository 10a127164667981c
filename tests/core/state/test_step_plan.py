"""Whom a plan leaves out and why, beside a launch that is as it would be."""

from __future__ import annotations

from eventlm.core.state.step_plan import StepPlan, WaitReason
from eventlm.events import Launched
from tests.core.rig import Rig, arrival


def plan_of(rig: Rig) -> StepPlan:
    (plan,) = rig.state.plans.values()
    return plan


def test_a_plan_has_the_rows_of_its_launch() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.arrive_all(arrival(6, 4), arrival(6, 4))
    (launched,) = rig.of(Launched)
    plan = plan_of(rig)
    assert (plan.step, plan.decodes, plan.chunks) == (launched.step, launched.decodes, launched.chunks)
    rig.complete()
    assert plan_of(rig).step == plan.step + 1


def test_a_plan_that_launches_nothing_has_no_step() -> None:
    rig = Rig(max_steps_in_flight=2)
    rig.arrive(4, 8)
    # The second step of the drain has nothing to run: the only sequence is in the first.
    assert len(rig.of(Launched)) == 1
    assert plan_of(rig).step == -1


def test_one_that_was_looked_at_has_its_own_reason_and_the_rest_of_the_line_the_common_one() -> None:
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_num_seqs=2)
    running, large, small, last = rig.arrive_all(arrival(32, 8), arrival(20, 4), arrival(4, 4), arrival(4, 4))
    plan = plan_of(rig)
    assert plan.left_out == {(large, 0): WaitReason("blocks", 0, num_lacking=3)}
    assert plan.rest == WaitReason("sequence_limit", 0)
    assert plan.wait_reason(rig.sequence(last)) == plan.rest
    # Residents do not wait in line.
    assert plan.wait_reason(rig.sequence(running)) is None
    assert plan.wait_reason(rig.sequence(small)) is None


def test_the_next_drain_forgets_the_plans_of_this_one() -> None:
    rig = Rig(max_steps_in_flight=1)
    rig.arrive(4, 8)
    assert rig.state.plans
    rig.arrive(4, 8)
    assert not rig.state.plans
