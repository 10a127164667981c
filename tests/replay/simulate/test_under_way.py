"""What remains of a workload: the live requests first, then later ones, with the turns that follow them."""

from __future__ import annotations

from msgspec import structs

from eventlm.replay.simulate.under_way import remaining_work
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from tests.made_requests import make_arrival


def request(s: int, *, group: tuple[int, int] = (1, 0), parent: int = -1) -> WorkloadRequest:
    arrival = make_arrival(prompt_tokens=5, max_tokens=3, s=s, group_size=group[0], group_index=group[1])
    think_ns = 7 if parent >= 0 else None
    return WorkloadRequest(
        arrival=arrival, arrival_ns=s, outputs=[SequenceOutput()], parent=parent, think_ns=think_ns, s=s
    )


WORK = Workload(
    source="made",
    requests=[
        request(1),
        request(4, group=(2, 0)),
        request(5, group=(2, 1), parent=0),
        request(20, parent=0),
        request(30, parent=2),
        request(40, group=(2, 0), parent=3),
        request(41, group=(2, 1), parent=3),
    ],
)


def test_live_requests_come_first_and_alone() -> None:
    found = remaining_work(WORK, [5], 10)
    assert [each.s for each in found.requests] == [5, 20, 30, 40, 41]
    assert found.groups() == [range(1), range(1, 2), range(2, 3), range(3, 5)]
    assert (found.requests[0].parent, found.requests[0].think_ns) == (-1, None)


def test_a_turn_follows_its_parent_only_where_that_has_not_ended() -> None:
    found = remaining_work(WORK, [5], 10)
    # The parent of 20 has ended, that of 30 is live, that of 40 arrives later.
    assert [(each.parent, each.think_ns) for each in found.requests[1:]] == [(-1, None), (0, 7), (1, 7), (1, 7)]


def test_before_the_first_arrival_all_remains() -> None:
    assert remaining_work(WORK, [], 0) == WORK
    assert remaining_work(WORK, [], 41).requests == []
    assert structs.replace(WORK, requests=[]) == remaining_work(WORK, [], 41)
