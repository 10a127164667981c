"""Finds fewer visits and faults with which a case still fails."""

from __future__ import annotations

from collections.abc import Callable

from tests.world.swarm.cases import Case


def shrink(case: Case, fails: Callable[[Case], bool], may_go_on: Callable[[], bool]) -> Case:
    """Leave out halves, quarters and finally single ones, until none can be left out or time is up."""
    plan = case.plan
    kept = [("fault", each.number) for each in plan.faults] + [("visit", each.number) for each in plan.visits]
    size = len(kept)
    while size and kept:
        size = min(size, len(kept))
        has_shrunk = False
        for start in range(0, len(kept), size)[::-1]:
            if not may_go_on():
                return _with(case, kept)
            fewer = kept[:start] + kept[start + size :]
            if fails(_with(case, fewer)):
                kept, has_shrunk = fewer, True
        if size > 1 or not has_shrunk:
            size //= 2
    return _with(case, kept)


def _with(case: Case, kept: list[tuple[str, int]]) -> Case:
    """The case with only these visits and faults."""
    plan = case._replace(without_visits=(), without_faults=()).plan
    return case._replace(
        without_visits=tuple(each.number for each in plan.visits if ("visit", each.number) not in kept),
        without_faults=tuple(each.number for each in plan.faults if ("fault", each.number) not in kept),
    )
