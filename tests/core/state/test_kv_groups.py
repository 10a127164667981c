"""Every token of a context lies in one KV group, and the groups take turns by shards."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eventlm.config import CoreConfig
from eventlm.core.shards import group_of
from eventlm.core.state.block_pool import BlockPool
from eventlm.core.state.kv_groups import allocate, blocks_by_group, group_at, least_held, tokens_in_group
from eventlm.events import Launched
from tests.core.rig import Rig, arrival

GROUPS, SHARD_BLOCKS = st.integers(2, 5), st.integers(1, 4)


def config_of(num_groups: int, shard_blocks: int) -> CoreConfig:
    return CoreConfig(
        models=["m"], num_blocks=64, max_model_len=512, num_kv_groups=num_groups, kv_shard_tokens=16 * shard_blocks
    )


@given(GROUPS, SHARD_BLOCKS, st.integers(0, 4), st.integers(0, 40), st.integers(0, 40))
def test_blocks_are_where_their_tokens_are(
    num_groups: int, shard_blocks: int, first_group: int, first: int, more: int
) -> None:
    config = config_of(num_groups, shard_blocks)
    first_group %= num_groups
    groups = [group_of(16 * block, first_group, 16 * shard_blocks, num_groups) for block in range(first, first + more)]
    assert [group_at(config, first_group, block) for block in range(first, first + more)] == groups
    counts = blocks_by_group(config, first_group, first, first + more)
    assert counts == [groups.count(group) for group in range(num_groups)]
    pool = BlockPool(64, num_groups=num_groups)
    assert [pool.group_of(block) for block in allocate(config, pool, first_group, first, first + more)] == groups


@given(GROUPS, SHARD_BLOCKS, st.integers(0, 4), st.integers(1, 700))
def test_tokens_are_counted_once(num_groups: int, shard_blocks: int, first_group: int, num_tokens: int) -> None:
    config = config_of(num_groups, shard_blocks)
    first_group %= num_groups
    found = [tokens_in_group(config, first_group, group, num_tokens) for group in range(num_groups)]
    groups = [group_of(token, first_group, 16 * shard_blocks, num_groups) for token in range(num_tokens)]
    assert found == [groups.count(group) for group in range(num_groups)]


def test_one_group_holds_everything() -> None:
    config = CoreConfig(models=["m"], num_blocks=64, max_model_len=512)
    assert blocks_by_group(config, 0, 3, 9) == [6]
    assert tokens_in_group(config, 0, 0, 77) == 77


def test_a_sequence_begins_where_least_is_held() -> None:
    pool = BlockPool(8, num_groups=3)
    assert least_held(pool) == 0
    pool.allocate(2, 0)
    pool.allocate(1, 1)
    assert least_held(pool) == 2


def rig_of(**limits: Any) -> Rig:
    """Two groups of blocks of 4 tokens, shards of two blocks."""
    return Rig(**({"num_kv_groups": 2, "kv_shard_tokens": 8, "num_blocks": 8, "max_model_len": 56} | limits))


def groups_of_blocks(rig: Rig, launched: Launched) -> list[int]:
    return [rig.state.replicas[0].pool.group_of(block) for _, _, blocks in launched.blocks for block in blocks]


def test_a_chunk_ends_with_its_shard_and_counts_in_every_group_that_holds_its_context() -> None:
    rig = rig_of()
    rig.arrive(20, 2)
    (launched,) = rig.of(Launched)
    assert [chunk[2:4] for chunk in launched.chunks] == [(0, 8)]
    # All blocks of the prompt and one more are reserved: two in each group by turns.
    assert groups_of_blocks(rig, launched) == [0, 0, 1, 1, 0, 0]
    assert (launched.num_tokens, launched.loads) == (8, [8, 0])
    rig.complete()
    (second,) = rig.of(Launched)
    assert [chunk[2:4] for chunk in second.chunks] == [(8, 8)]
    assert (second.num_tokens, second.loads) == (8, [8, 8])
    rig.complete()
    assert [chunk[2:] for chunk in rig.of(Launched)[0].chunks] == [(16, 4, 1)]
    rig.finish_all()


def test_short_sequences_begin_in_different_groups_and_each_group_has_its_own_budget() -> None:
    rig = rig_of(max_num_batched_tokens=4)
    rig.arrive_all(*(arrival(4, 3) for _ in range(3)))
    (launched,) = rig.of(Launched)
    # One prompt fits into each group's budget; the third waits.
    assert (len(launched.chunks), launched.loads) == (2, [4, 4])
    rig.complete()
    (second,) = rig.of(Launched)
    assert (len(second.decodes), len(second.chunks), sorted(second.loads)) == (2, 1, [1, 4])
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_a_sequence_begins_where_its_hits_are() -> None:
    rig = rig_of()
    rig.arrive(8, 2, blocks=[11, 12])
    rig.complete()
    rig.complete()
    rig.arrive(4, 20)
    rig.arrive(12, 2, blocks=[11, 12, 13])
    rig.complete()
    pool = rig.state.replicas[0].pool
    hit = next(sequence for sequence in rig.state.replicas[0].running if sequence.num_tokens == 12)
    assert [pool.group_of(block) for block in hit.block_table] == [0, 0, 1, 1]
    assert hit.block_table[:2] == [pool.tree[name][0] for name in (11, 12)]
    rig.finish_all()


def test_a_decode_takes_its_block_from_a_victim_in_the_group_that_lacks_one() -> None:
    rig = rig_of(num_blocks=3, max_model_len=16)
    first = rig.arrive(8, 8, priority=-1)
    second = rig.arrive(3, 5)
    rig.complete()
    pool = rig.state.replicas[0].pool
    tables = {s.request: [pool.group_of(block) for block in s.block_table] for s in rig.state.replicas[0].running}
    assert tables == {first: [0, 0, 1], second: [1, 1]}
    assert (pool.available_in(0), pool.available_in(1)) == (1, 0)
    while not rig.preempted():
        rig.complete()
    # The first has filled its block of the other group. One of its own group is free, and is of no use to it.
    assert rig.preempted() == [(second, "memory")]
    assert pool.available_in(0) == 1
    rig.finish_all()
    assert len(rig.finished()) == 2


def test_one_that_evicts_begins_in_the_group_for_which_it_did() -> None:
    rig = rig_of(num_kv_groups=3, kv_shard_tokens=4, num_blocks=3, max_model_len=16)
    for prompt_tokens, max_tokens, priority in ((1, 3, 4), (7, 5, -2), (1, 4, -2), (5, 1, 3), (1, 5, -5), (4, 2, -3)):
        rig.arrive(prompt_tokens, max_tokens, priority=priority)
    rig.arrive(7, 5, priority=4)
    while not rig.preempted():
        rig.complete()
    rig.finish_all()
    assert len(rig.finished()) == 7
