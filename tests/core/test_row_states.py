"""Where rows start from, where they keep copies of their state, and how far hits reach with it."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.core.row_states import whole_blocks
from eventlm.core.state.sequence import Sequence
from eventlm.events import CacheFlushed, Finished, Launched
from tests.core.rig import Rig


def rig_with(**limits: Any) -> Rig:
    return Rig(**({"state_slots": 12} | limits))


def run(rig: Rig, prompt_tokens: int, blocks: list[int], max_tokens: int = 1) -> tuple[list[Any], int]:
    """Let a request run alone: (chunk start, source, positions of copies) of its rows, and its cached tokens."""
    num_before = len(rig.decisions)
    rig.arrive(prompt_tokens, max_tokens, blocks=blocks)
    rig.finish_all()
    rows = []
    for launched in rig.decisions[num_before:]:
        if isinstance(launched, Launched):
            for row, _, source, copies in launched.states:
                start = launched.chunks[row][2] if row < len(launched.chunks) else -1
                rows.append((start, source, [position for position, _ in copies]))
    [end] = [decision for decision in rig.decisions[num_before:] if isinstance(decision, Finished)]
    return rows, end.cached_tokens


def test_without_slots_launches_say_nothing_of_states() -> None:
    rig = Rig()
    assert run(rig, 10, [1, 2]) == ([], 0)
    assert "states" not in rig.core.digests()
    assert "states" in rig_with().core.digests()


def test_each_turn_of_a_chat_starts_where_the_prompt_before_ended() -> None:
    rig = rig_with(num_blocks=40, max_model_len=150, max_num_batched_tokens=64)
    last = 0
    for turn in range(1, 7):
        prompt_tokens = 15 * turn
        blocks = list(range(1, prompt_tokens // 4 + 1))
        ((start, source, positions),), cached = run(rig, prompt_tokens, blocks, max_tokens=3)
        assert start == cached == last
        assert (source == -1) == (turn == 1)
        last = positions[-1]
        assert last == prompt_tokens // 4 * 4


def test_a_prompt_of_whole_blocks_leaves_a_copy_that_it_can_hit_itself() -> None:
    rig = rig_with()
    assert run(rig, 8, [1, 2]) == ([(0, -1, [4, 8])], 0)
    assert run(rig, 8, [1, 2])[1] == 4
    assert run(rig, 9, [1, 2])[1] == 8


def test_copies_are_kept_at_intervals_inside_the_chunks() -> None:
    rig = rig_with(state_interval=8, max_num_batched_tokens=18)
    rows, _ = run(rig, 31, [1, 2, 3, 4, 5, 6, 7])
    assert rows == [(0, -1, [8, 16]), (18, 0, [24, 28])]


def test_where_prompts_part_the_third_one_can_start() -> None:
    rig = rig_with()
    assert run(rig, 22, [1, 2, 3, 14, 15]) == ([(0, -1, [20])], 0)
    # The keys and values of three blocks are there, but no state.
    assert run(rig, 22, [1, 2, 3, 24, 25]) == ([(0, -1, [12, 20])], 0)
    ((start, source, positions),), cached = run(rig, 22, [1, 2, 3, 34, 35])
    assert (start, cached, positions) == (12, 12, [20])
    assert source >= 0


def test_samples_of_one_prompt_compute_it_once() -> None:
    rig = rig_with()
    rig.arrive(14, 2, n=3, blocks=[1, 2, 3])
    (launched,) = rig.of(Launched)
    assert [(start, num_tokens) for _, _, start, num_tokens, _ in launched.chunks] == [(0, 14), (12, 2), (12, 2)]
    (_, first, _, [(position, copy)]), second, third = launched.states
    assert position == 12
    assert [second[2], third[2]] == [copy, copy]
    assert len({first, copy, second[1], third[1]}) == 4


def test_a_partial_prefill_goes_on_from_a_deeper_copy_of_another() -> None:
    rig = rig_with(max_num_batched_tokens=12)
    blocks = [1, 2, 3, 4, 5, 6, 7]
    slow = rig.arrive(29, 1, blocks=blocks)
    fast = rig.arrive(29, 1, blocks=blocks, priority=-1)
    rig.finish_all()
    starts: dict[int, list[int]] = {slow: [], fast: []}
    for launched in rig.decisions:
        if isinstance(launched, Launched):
            for request, _, start, _, _ in launched.chunks:
                starts[request].append(start)
    assert starts == {slow: [0, 28], fast: [0, 12, 24]}


def test_a_decode_keeps_copies_at_intervals_once_their_blocks_have_names() -> None:
    rig = rig_with(state_interval=8)
    seq = rig.arrive(6, 12, blocks=[1])
    rig.complete()
    for _ in range(2):
        # Positions 7 and 8; the second row completes the second block.
        launched = rig.of(Launched)[0]
        rig.complete(filled=[(0, [2])] if launched.states else [])
    states = [launched.states for launched in rig.decisions if isinstance(launched, Launched)]
    assert [[copies[0][0] for *_, copies in rows if copies] for rows in states] == [[4], [], [8], []]
    rig.finish_all()
    assert not rig.state.requests.get(seq)
    assert run(rig, 10, [1, 2])[1] == 8


def test_a_flush_takes_the_copies_of_the_blocks_that_go() -> None:
    rig = rig_with()
    run(rig, 10, [1, 2])
    rig.feed(CacheFlushed())
    assert run(rig, 10, [1, 2])[1] == 0


def test_the_context_is_read_as_far_as_copies_reach_by_whoever_looks() -> None:
    rig = rig_with()
    run(rig, 22, [1, 2, 3, 14, 15])
    replica = rig.state.replicas[0]
    seq = rig.arrive(22, 1, blocks=[1, 2, 3, 24, 25])
    waiting = Sequence(rig.sequence(seq).arrival, 0, rig.sequence(seq).view)
    rig.finish_all()
    waiting.block_names = [1, 2, 3, 34]
    assert replica.prefix_tokens(waiting, 4) == replica.hit_tokens(waiting, 4) == 12
    waiting.paths.clear()
    waiting.block_names = [1, 2, 33, 34]
    assert replica.prefix_tokens(waiting, 4) == replica.hit_tokens(waiting, 4) == 0


@pytest.mark.parametrize(
    ("launched", "num_tokens", "max_tokens", "found"),
    [
        (0, 10, 32, 8),
        (0, 3, 32, 4),
        (0, 3, 3, 0),
        (0, 12, 32, 12),
        (0, 14, 32, 14),
        (6, 3, 32, 2),
        (6, 1, 1, 0),
        (4, 0, 32, 0),
    ],
)
def test_no_chunk_ends_inside_a_block_of_the_tree(launched: int, num_tokens: int, max_tokens: int, found: int) -> None:
    rig = rig_with()
    sequence = rig.sequence(rig.arrive(20, 1))
    sequence.launched_tokens, sequence.num_tree_blocks = launched, 3
    assert whole_blocks(sequence, num_tokens, max_tokens, 4) == found
