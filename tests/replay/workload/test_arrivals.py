"""When groups arrive: at their times, behind the turn before, or as clients of a closed loop come free."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.errors import UsageError
from eventlm.replay.workload.arrivals import ArrivalPlan
from eventlm.replay.workload.workload import Workload
from tests.replay.what_if_runs import MILLISECOND, requests_of


def grouped(workload: Workload, first: int, size: int) -> Workload:
    """Some of the requests arrive as one."""
    requests = list(workload.requests)
    for index in range(size):
        request = requests[first + index]
        arrival = structs.replace(request.arrival, group_size=size, group_index=index)
        requests[first + index] = structs.replace(request, arrival=arrival, arrival_ns=requests[first].arrival_ns)
    return structs.replace(workload, requests=requests)


def test_open_arrivals_come_at_their_times() -> None:
    plan = ArrivalPlan(grouped(requests_of([0, 10, 20, 30]), 1, 2))
    assert [(*each.group, each.arrival_ns) for each in plan.first()] == [
        (0, 0),
        (1, 2, 10 * MILLISECOND),
        (3, 30 * MILLISECOND),
    ]
    assert plan.ended(0, 99) == []


def test_a_turn_comes_when_somebody_has_thought_about_the_answer() -> None:
    workload = requests_of([0, 10, 20])
    first, second, third = workload.requests
    turns = [first, structs.replace(second, parent=0, think_ns=7), structs.replace(third, parent=0)]
    plan = ArrivalPlan(structs.replace(workload, requests=turns))
    assert len(plan.first()) == 1
    # Without a time to think it comes at its own, or now.
    assert [each.arrival_ns for each in plan.ended(0, 1_000)] == [1_007, 20 * MILLISECOND]
    plan = ArrivalPlan(structs.replace(workload, requests=turns))
    plan.first()
    late_ns = 50 * MILLISECOND
    assert [each.arrival_ns for each in plan.ended(0, late_ns)] == [late_ns + 7, late_ns]


def test_clients_of_a_closed_loop_start_with_the_first_and_go_on_as_groups_end() -> None:
    plan = ArrivalPlan(grouped(requests_of([5, 10, 20, 30, 40]), 1, 2), closed_loop=2)
    assert [(*each.group, each.arrival_ns) for each in plan.first()] == [
        (0, 5 * MILLISECOND),
        (1, 2, 5 * MILLISECOND),
    ]
    # A group has ended with the last of its members.
    assert plan.ended(1, 100) == []
    assert [(*each.group, each.arrival_ns) for each in plan.ended(2, 200)] == [(3, 200)]
    assert [(*each.group, each.arrival_ns) for each in plan.ended(0, 300)] == [(4, 300)]
    assert plan.ended(3, 400) == []


def test_a_negative_number_of_clients_is_refused() -> None:
    with pytest.raises(UsageError, match="closed loop of -1"):
        ArrivalPlan(requests_of([0]), closed_loop=-1)
