from __future__ import annotations

from msgspec import structs

from eventlm.replay.shrink.parts import conversations, keep_requests
from eventlm.replay.workload.file import decode_workload, encode_workload
from eventlm.replay.workload.workload import Workload
from tests.replay.made_workloads import make_workload


def _linked(parents: list[int], groups: list[int]) -> Workload:
    """Requests with these parents, in groups of these sizes, all at one time."""
    requests = []
    indices = [(size, index) for size in groups for index in range(size)]
    for request, parent, (size, index) in zip(
        make_workload(0, num_requests=len(parents)).requests, parents, indices, strict=True
    ):
        arrival = structs.replace(request.arrival, group_size=size, group_index=index)
        requests.append(structs.replace(request, arrival=arrival, arrival_ns=7, parent=parent, think_ns=5))
    return Workload(source="linked", requests=requests, block_size=16, first_free_name=1 << 20)


def test_a_turn_follows_the_nearest_turn_that_is_kept() -> None:
    workload = _linked([-1, 0, 1, -1, 2], [1, 1, 1, 1, 1])
    kept = keep_requests(workload, [0, 3, 4])
    assert [request.parent for request in kept.requests] == [-1, -1, 0]
    assert kept.requests[2].think_ns == 5
    alone = keep_requests(workload, [3, 4])
    assert [(request.parent, request.think_ns) for request in alone.requests] == [(-1, None), (-1, None)]


def test_a_group_shrinks_to_its_kept_members() -> None:
    workload = _linked([-1, 0, -1, -1, 1], [1, 3, 1])
    kept = keep_requests(workload, [0, 2, 3, 4])
    assert [(r.arrival.group_size, r.arrival.group_index) for r in kept.requests] == [(1, 0), (2, 0), (2, 1), (1, 0)]
    # The first of a group that is left follows what the group followed.
    assert [request.parent for request in kept.requests] == [-1, 0, -1, 0]


def test_what_is_kept_is_a_workload() -> None:
    workload = make_workload(5)
    for step in (2, 3, 7):
        kept = keep_requests(workload, range(0, len(workload.requests), step))
        assert decode_workload(encode_workload(kept), "w") == kept
    assert keep_requests(workload, range(len(workload.requests))).requests[0] == workload.requests[0]


def test_conversations_hold_together() -> None:
    workload = _linked([-1, 0, -1, -1, 2, 1], [1, 1, 2, 1, 1])
    assert conversations(workload) == [[0, 1, 5], [2, 3, 4]]
