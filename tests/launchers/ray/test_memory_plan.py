"""KV blocks out of the memory of several hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from eventlm.core.shards import Layout, context_capacity
from eventlm.engine.setup import worker_setups
from eventlm.launchers.launcher import LaunchError
from eventlm.launchers.ray.memory_plan import PlacedReplica, setups_with_blocks
from eventlm.launchers.ray.messages import HostFacts
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.rank_memory import RankMemory
from tests.engine.engines import fake_setup

MEMORY = RankMemory(
    weights=1000,
    activations=500,
    position=0,
    block=10,
    states=0,
    most_cache=1 << 40,
    min_context=1,
    most_blocks=1 << 24,
)


def replica(
    nodes: dict[str, int], places: str, number: int = 0, memory: RankMemory = MEMORY, **changes: object
) -> PlacedReplica:
    """A pipeline whose stages are on the nodes of these letters. nodes: bytes that are free there."""
    [setup] = worker_setups(fake_setup())
    given = {"replica": number, "num_blocks": 0, "max_model_len": 10_000, "layout": Layout(stages=len(places))}
    setups = [structs.replace(setup, rank=rank, memory=memory, **(given | changes)) for rank in range(len(places))]
    hosts = [HostFacts(host=node, address=f"10.0.0.{ord(node)}", node=node, free_bytes=nodes[node]) for node in places]
    return PlacedReplica(setups, hosts)


def blocks(*replicas: PlacedReplica, others: Sequence[PlacedReplica] = ()) -> set[int]:
    """Numbers of blocks of all ranks of the replicas."""
    found: list[WorkerSetup] = [
        setup for each in replicas for setup in setups_with_blocks(each.setups, replicas, others)
    ]
    return {setup.num_blocks for setup in found}


def test_the_ranks_of_a_host_share_it_and_the_least_counts() -> None:
    # A quarter of what 6,000 / 2 leaves beside weights and activations; 4,000 are enough for more.
    assert blocks(replica({"a": 6000, "b": 4000}, "aab")) == {37}
    assert blocks(replica({"a": 9000, "b": 4000}, "aab")) == {62}


def test_replicas_that_share_a_host_count_together() -> None:
    nodes = {"a": 8000, "b": 8000}
    assert blocks(replica(nodes, "ab")) == {162}
    assert blocks(replica(nodes, "ab"), replica(nodes, "a", 1)) == {62}


def test_replicas_of_another_model_count_beside_them() -> None:
    nodes = {"a": 10_000, "b": 10_000}
    large = replica(nodes, "a", 1, structs.replace(MEMORY, weights=5000, block=100))
    # Of 10,000 bytes, 7,000 are weights and activations, and each has a quarter of half of the rest.
    assert blocks(replica(nodes, "ab"), others=[large]) == {37}
    assert blocks(large, others=[replica(nodes, "ab")]) == {3}
    # Either would fit alone.
    with pytest.raises(LaunchError, match="as one of 2 ranks there it can have 4,500 bytes"):
        blocks(
            *[replica({"a": 9000}, "a", memory=structs.replace(MEMORY, weights=5000))],
            others=[replica({"a": 9000}, "a", 1, memory=structs.replace(MEMORY, weights=5000))],
        )


def test_a_number_that_is_given_is_kept_where_it_can_begin() -> None:
    assert blocks(replica({"a": 2000}, "a", num_blocks=5000)) == {5000}
    with pytest.raises(LaunchError, match="too little memory"):
        blocks(replica({"a": 1519}, "a", num_blocks=5000))


def test_the_context_is_cut_to_what_the_blocks_hold() -> None:
    placed = replica({"a": 2500}, "a")
    [setup] = setups_with_blocks(placed.setups, [placed])
    assert (setup.num_blocks, setup.max_model_len) == (25, context_capacity(25, setup.block_size))
    assert (
        setups_with_blocks(replica({"a": 10**9}, "a").setups, [replica({"a": 10**9}, "a")])[0].max_model_len == 10_000
    )


def test_no_rank_has_more_than_an_engine_can_have_or_than_is_its_share() -> None:
    nodes = {"a": 10**9}
    assert blocks(replica(nodes, "a", memory=structs.replace(MEMORY, most_blocks=70))) == {70}
    assert blocks(replica(nodes, "a", memory=structs.replace(MEMORY, most_cache=800))) == {80}


def test_rotary_tables_and_states_come_out_of_the_cache() -> None:
    memory = structs.replace(MEMORY, position=2, states=100)
    # 1,000 bytes less 100 for blocks of 10 bytes and their positions' tables.
    assert blocks(replica({"a": 5500}, "a", memory=memory)) == {900 // (10 + 2 * 16)}


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    with pytest.raises(LaunchError) as caught:
        blocks(replica({"a": 9000, "b": 3030}, "abb", 3))
    assert str(caught.value) == (
        "rank 1 of replica 3 on b (10.0.0.98) has too little memory: it takes weights 1,000 bytes, activations 500 "
        "bytes, the KV cache of one sequence 20 bytes, and as one of 2 ranks there it can have 1,515 bytes; "
        "take hosts with more, more of them, or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
    )
    assert not caught.value.waits_for_room


def test_a_context_that_was_asked_for_must_fit_into_the_cache() -> None:
    long = structs.replace(MEMORY, min_context=1600)
    with pytest.raises(LaunchError, match=r"the KV cache gets 25 blocks of 10 bytes, too few for a context of 1,600"):
        blocks(replica({"a": 2530}, "a", memory=long))
    # Over two KV groups.
    layout = Layout(groups=2)
    [found] = blocks(replica({"a": 7130}, "aa", memory=long, layout=layout, kv_shard_tokens=16))
    assert found == 51
