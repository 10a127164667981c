"""What is left of a host's memory for a rank's KV cache."""

from __future__ import annotations

from eventlm.worker.rank_memory import RankMemory, blocks_beside_tables


def test_tables_are_of_the_blocks_or_of_the_longest_context() -> None:
    assert blocks_beside_tables(1000, 10, 0, block_size=16, longest=10**6) == 100
    # 10 + 16 bytes for each block.
    assert blocks_beside_tables(1000, 10, 1, block_size=16, longest=10**6) == 38
    # 32 bytes for all.
    assert blocks_beside_tables(1000, 10, 1, block_size=16, longest=32) == 96


def test_a_rank_that_has_no_room_gets_none() -> None:
    memory = RankMemory(
        weights=100, activations=0, position=1, block=10, states=5, most_cache=1000, min_context=1, most_blocks=50
    )
    assert memory.num_blocks(99, block_size=16, longest=100) == 0
    assert memory.num_blocks(100, block_size=16, longest=100) == 0
    assert memory.num_blocks(10_000, block_size=16, longest=100) == 50
