from __future__ import annotations

from eventlm.worker.fake.states import FakeStates, fold
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.worker.launches import new_sequence


def row(
    token_ids: list[int], slot: int, start: int, num_tokens: int, source: int, copies: list[tuple[int, int]]
) -> Row:
    sequence = WorkerSequence(new_sequence(1, token_ids))
    sequence.state_slot = slot
    return Row(sequence, start, num_tokens, True, source, copies)


def test_a_state_depends_on_every_token_and_its_place() -> None:
    states = {fold(0, tokens) for tokens in ([], [0], [0, 0], [1], [1, 2], [2, 1])}
    assert len(states) == 6
    assert fold(fold(0, [5, 6]), [7]) == fold(0, [5, 6, 7])


def test_rows_go_on_from_their_source_and_keep_copies_on_the_way() -> None:
    states = FakeStates(4)
    assert states.advance(row([5, 6, 7, 8], 1, 0, 3, -1, [(2, 0), (3, 2)])) == fold(0, [5, 6, 7])
    assert states.advance(row([5, 6, 7, 8], 1, 3, 1, 1, [])) == fold(0, [5, 6, 7, 8])
    # Another goes on from the first copy, and keeps its own where that was.
    assert states.advance(row([5, 6, 9], 3, 2, 1, 0, [(3, 0)])) == fold(0, [5, 6, 9])
    assert states.advance(row([5, 6, 9, 1], 1, 3, 1, 0, [])) == fold(0, [5, 6, 9, 1])
    assert states.advance(row([5, 6, 7, 1], 1, 3, 1, 2, [])) == fold(0, [5, 6, 7, 1])


def test_a_row_from_zero_does_not_see_what_the_slot_had() -> None:
    states = FakeStates(1)
    states.advance(row([5], 0, 0, 1, -1, []))
    assert states.advance(row([6], 0, 0, 1, -1, [])) == fold(0, [6])
