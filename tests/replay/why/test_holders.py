"""Who holds blocks, and with whom."""

from __future__ import annotations

import time

from eventlm.replay.why.holders import MAX_NAMED, find_pool_use
from tests.core.rig import Rig, arrival


def test_blocks_add_up() -> None:
    rig = Rig(num_blocks=12, max_model_len=44)
    one = rig.arrive(9, 1, blocks=[1, 2])
    two, three = rig.arrive_all(arrival(9, 4, blocks=[1, 2]), arrival(4, 4))
    rig.complete()
    found = find_pool_use(rig.state.replicas[0])
    assert one not in rig.state.requests
    # Two leading blocks are held again by the second; nobody else shares them.
    assert {(each.sequence.request, each.num_blocks, each.num_own) for each in found.holders} == {
        (two, 4, 4),
        (three, 2, 2),
    }
    assert found.num_free + found.num_cached + found.num_held == found.num_blocks == 12
    assert found.num_held == 6
    assert all(each.shared_with == [] for each in found.holders)


def test_a_shared_beginning_is_named_with_a_few_of_those_who_share_it() -> None:
    rig = Rig(num_blocks=64, max_model_len=60, max_num_seqs=32)
    requests = rig.arrive_all(*(arrival(9, 4, blocks=[1, 2]) for _ in range(MAX_NAMED + 3)))
    rig.complete()
    found = find_pool_use(rig.state.replicas[0])
    last = next(each for each in found.holders if each.sequence.request == requests[-1])
    assert last.num_blocks - last.num_own == 2
    assert last.num_sharing == MAX_NAMED + 2
    assert [each.request for each in last.shared_with] == requests[:MAX_NAMED]
    assert found.num_held == sum(each.num_own for each in found.holders) + 2


def test_a_long_shared_beginning_does_not_take_long() -> None:
    names, num_requests = list(range(1, 1001)), 256
    rig = Rig(
        num_blocks=2048, max_model_len=4100, max_num_seqs=num_requests, max_num_batched_tokens=8192, max_queue_len=1000
    )
    rig.arrive_all(*(arrival(4001, 40, blocks=names) for _ in range(num_requests)))
    while len(rig.state.replicas[0].running) < num_requests:
        rig.complete()
    began = time.process_time()
    found = find_pool_use(rig.state.replicas[0])
    assert time.process_time() - began < 1.5
    assert {each.num_sharing for each in found.holders} == {num_requests - 1}
