"""Layouts number every place once, and shares cover what is dealt out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.shards import Layout, Place, context_capacity, deal_out, deal_out_granules, group_of, tokens_of_shards

SMALL = st.integers(1, 8)


@given(SMALL, SMALL, SMALL)
def test_every_rank_has_one_place(tensor: int, stages: int, groups: int) -> None:
    layout = Layout(tensor, stages, groups)
    places = [layout.place_of(rank) for rank in range(layout.num_ranks)]
    assert len(set(places)) == tensor * stages * groups
    assert [layout.rank_at(place) for place in places] == list(range(layout.num_ranks))
    assert [layout.place_of(rank).stage for rank in layout.ranks_of_stage(stages - 1)] == [stages - 1] * tensor * groups


def test_tensor_ranks_are_neighbours_and_the_last_stage_answers() -> None:
    layout = Layout(tensor=2, stages=3, groups=4)
    assert layout.place_of(1) == Place(0, 0, 1)
    assert layout.place_of(2) == Place(0, 1, 0)
    assert layout.answering_rank == 16
    assert Layout().answering_rank == 0


@given(st.integers(0, 300), SMALL, st.integers(1, 64))
def test_shares_cover_everything_once(count: int, num_parts: int, granule: int) -> None:
    for shares in (deal_out(count, num_parts), deal_out_granules(count, num_parts, granule)):
        assert [number for share in shares for number in share] == list(range(count))
        assert len(shares) == num_parts
    assert all(not share or share.start % granule == 0 for share in deal_out_granules(count, num_parts, granule))


def test_three_heads_of_two_ranks() -> None:
    assert deal_out(3, 2) == [range(2), range(2, 3)]


def test_shards_go_round_the_groups() -> None:
    assert [group_of(position, 2, 16, 3) for position in (0, 15, 16, 31, 32, 48)] == [2, 2, 0, 0, 1, 2]


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 47, 48, 50, 64, 200])
def test_tokens_of_a_group_s_shards_are_counted(num_tokens: int) -> None:
    held = [group_of(position, 0, 16, 3) for position in range(num_tokens)]
    found = [tokens_of_shards(num_tokens, first_shard, 16, 3) for first_shard in range(3)]
    assert found == [held.count(group) for group in range(3)]


@given(st.integers(2, 40), SMALL, st.integers(1, 6))
def test_the_longest_context_fits_and_one_more_token_does_not(num_blocks: int, groups: int, shard_blocks: int) -> None:
    capacity = context_capacity(num_blocks, 4, groups, 4 * shard_blocks)

    def most_held(num_tokens: int) -> int:
        held = [group_of(position, 0, 4 * shard_blocks, groups) for position in range(num_tokens)]
        return max((held.count(group) for group in range(groups)), default=0)

    assert most_held(capacity) <= (num_blocks - 1) * 4 < most_held(capacity + 1)


def test_a_layout_and_its_ranks_in_words() -> None:
    assert Layout(2, 2, 1).describe() == "2 stages of 2 tensor ranks"
    assert Layout(2, 2, 1).name_of(3) == "rank 3 of 4 (stage 1, tensor rank 1)"
    assert Layout(1, 2, 3).name_of(4) == "rank 4 of 6 (stage 1, KV group 1)"
    assert Layout(4).name_of(2) == "rank 2 of 4 (tensor rank 2)"
    assert Layout().describe() == ""
