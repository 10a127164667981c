"""Shrinking, with a made-up failure."""

from __future__ import annotations

from tests.world.plans.plan import draw_plan
from tests.world.swarm.cases import Case
from tests.world.swarm.shrink import shrink

_PLAN = next(plan for plan in map(draw_plan, range(1000)) if len(plan.visits) > 20 and len(plan.faults) > 8)


def _needs(visits: set[int], faults: set[int], tried: list[Case]) -> bool:
    plan = tried[-1].plan
    return visits <= {each.number for each in plan.visits} and faults <= {each.number for each in plan.faults}


def test_only_what_is_needed_is_left() -> None:
    tried: list[Case] = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return _needs({3, 17}, {2, 7}, tried)

    plan = shrink(Case(_PLAN.seed), fails, lambda: True).plan
    assert [each.number for each in plan.visits] == [3, 17]
    assert [each.number for each in plan.faults] == [2, 7]
    assert len(tried) < 80


def test_nothing_is_left_where_nothing_is_needed() -> None:
    plan = shrink(Case(_PLAN.seed), lambda case: True, lambda: True).plan
    assert (plan.visits, plan.faults) == ([], [])


def test_what_was_left_out_stays_out_when_time_is_up() -> None:
    case = Case(_PLAN.seed, without_visits=(1,), without_faults=(2, 3))
    assert shrink(case, lambda case: True, lambda: False) == case
