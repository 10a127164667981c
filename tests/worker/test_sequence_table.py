from __future__ import annotations

import subprocess
import sys

import pytest

from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import StepPayload
from eventlm.worker.sequence_table import DesyncError, SequenceTable, end_of
from tests.worker.launches import launched, new_sequence, payload


@pytest.fixture
def table() -> SequenceTable:
    return SequenceTable(block_size=4, num_blocks=16)


def prefill(table: SequenceTable, length: int = 6) -> None:
    """Sequence 1/0, its prompt computed in step 0, token 100 sampled."""
    rows = table.apply(
        launched(0, chunks=[(1, 0, 0, length, 1)], blocks=[(0, 0, [3, 5])]),
        payload(new_sequence(1, list(range(length)))),
    )
    table.record(rows, [[100]])


def test_rows_of_a_mixed_step(table: SequenceTable) -> None:
    prefill(table)
    launch = launched(1, decodes=[(1, 0, 7, 0)], chunks=[(2, 1, 4, 3, 0)], blocks=[(1, 0, [7, 8, 9])])
    decode, chunk = table.apply(launch, payload(new_sequence(2, list(range(9)), index=1)))
    assert (decode.start, decode.num_tokens, decode.samples) == (6, 1, True)
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (4, 3, False)
    assert list(decode.sequence.block_table) == [3, 5]
    assert list(chunk.sequence.block_table) == [7, 8, 9]


def test_run_ahead_knows_unconfirmed_tokens(table: SequenceTable) -> None:
    prefill(table)
    for step, (confirmed, in_flight) in enumerate([(6, 1), (6, 2), (7, 2), (8, 2)], start=1):
        rows = table.apply(launched(step, decodes=[(1, 0, confirmed, in_flight)], blocks=[(0, 2, [9])]), payload())
        table.record(rows, [[100 + step]])
    assert rows[0].sequence.token_ids == [*range(6), 100, 101, 102, 103, 104]
    assert rows[0].sequence.position == 5


def test_steps_without_and_with_several_tokens_count(table: SequenceTable) -> None:
    prefill(table)
    for step, (confirmed, in_flight, produced) in enumerate([(7, 0, []), (7, 1, [8, 9]), (7, 1, [])], start=1):
        rows = table.apply(launched(step, decodes=[(1, 0, confirmed, in_flight)], blocks=[(0, 2, [9])]), payload())
        table.record(rows, [produced])
    table.apply(launched(9, decodes=[(1, 0, 9, 1)]), payload())


@pytest.mark.parametrize(("confirmed", "in_flight"), [(6, 0), (8, 0), (7, 1), (5, 2), (6, 2)])
def test_a_wrong_length_is_a_desync(table: SequenceTable, confirmed: int, in_flight: int) -> None:
    prefill(table)
    with pytest.raises(DesyncError, match="1/0"):
        table.apply(launched(1, decodes=[(1, 0, confirmed, in_flight)]), payload())


def test_forget_comes_before_new(table: SequenceTable) -> None:
    prefill(table)
    launch = launched(1, chunks=[(1, 0, 4, 3, 1)], blocks=[(0, 0, [0, 1])], forget=[(1, 0), (9, 0)])
    (row,) = table.apply(launch, payload(new_sequence(1, [*range(6), 100], num_prompt_tokens=6)))
    assert row.sequence.position == 1
    assert list(row.sequence.block_table) == [0, 1]
    assert len(table) == 1


def test_a_block_can_be_exchanged(table: SequenceTable) -> None:
    prefill(table)
    (row,) = table.apply(launched(1, decodes=[(1, 0, 7, 0)], blocks=[(0, 0, [11]), (0, 2, [12, 13])]), payload())
    assert list(row.sequence.block_table) == [11, 5, 12, 13]


@pytest.mark.parametrize(
    ("launch", "new"),
    [
        (launched(1, decodes=[(2, 0, 7, 0)]), []),
        (launched(1, decodes=[(1, 1, 7, 0)]), []),
        (launched(1, decodes=[(1, 0, 7, 0)], blocks=[(1, 0, [1])]), []),
        (launched(1, decodes=[(1, 0, 7, 0)], blocks=[(0, 3, [1])]), []),
        (launched(1, decodes=[(1, 0, 7, 0)], blocks=[(0, 2, [16])]), []),
        (launched(1, chunks=[(1, 0, 5, 3, 0)]), []),
        (launched(1, chunks=[(1, 0, 5, 1, 1)]), []),
        (launched(1, chunks=[(1, 0, 5, 0, 0)]), []),
        (launched(1, chunks=[(2, 0, 0, 3, 1)]), [new_sequence(2, [1, 2, 3])]),
        (launched(1), [new_sequence(1, [1, 2, 3])]),
        (launched(1), [new_sequence(2, [])]),
        (launched(1), [new_sequence(2, [1], num_prompt_tokens=2)]),
    ],
)
def test_what_disagrees_is_a_desync(table: SequenceTable, launch, new) -> None:
    prefill(table)
    with pytest.raises(DesyncError):
        table.apply(launch, payload(*new))


@pytest.fixture
def stateful() -> SequenceTable:
    """Holds sequence 1/0 of 6 tokens, computed from zero in slot 2."""
    table = SequenceTable(block_size=4, num_blocks=16, state_slots=4)
    launch = launched(0, chunks=[(1, 0, 0, 6, 1)], blocks=[(0, 0, [3, 5])], states=[(0, 2, -1, [(4, 3)])])
    (row,) = table.apply(launch, payload(new_sequence(1, list(range(6)))))
    assert (row.state_source, row.state_copies, row.sequence.state_slot) == (-1, [(4, 3)], 2)
    table.record([row], [[100]])
    return table


def test_rows_have_the_source_of_their_state_and_the_copies_to_keep(stateful: SequenceTable) -> None:
    launch = launched(
        1, decodes=[(1, 0, 7, 0)], chunks=[(2, 0, 4, 5, 1)], blocks=[(1, 0, [1, 2, 4])], states=[(1, 0, 3, [(8, 3)])]
    )
    decode, chunk = stateful.apply(launch, payload(new_sequence(2, list(range(9)))))
    assert (decode.state_source, decode.state_copies) == (2, ())
    assert (chunk.state_source, chunk.state_copies, chunk.sequence.state_slot) == (3, [(8, 3)], 0)


def test_a_row_after_one_without_a_token_keeps_no_copy(stateful: SequenceTable) -> None:
    rows = stateful.apply(launched(1, decodes=[(1, 0, 7, 0)]), payload())
    stateful.record(rows, [[]])
    (row,) = stateful.apply(launched(2, decodes=[(1, 0, 7, 1)], states=[(0, 2, 2, [(8, 3)])]), payload())
    assert row.state_copies == []


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ([(1, 2, 2, [])], "row 1 of 1"),
        ([(0, 4, 4, [])], "slot 4 of 4"),
        ([(0, 2, 4, [])], "slot 4 of 4"),
        ([(0, 2, 2, [(7, 4)])], "slot 4 of 4"),
        ([(0, 1, 2, [])], "in slot 1, but it is in 2"),
        ([(0, 2, -1, [])], "from zero at token 6"),
        ([(0, 2, 2, [(6, 3)])], "at token 6 to slot 3"),
        ([(0, 2, 2, [(8, 3)])], "at token 8 to slot 3"),
        ([(0, 2, 2, [(7, 2)])], "at token 7 to slot 2"),
    ],
)
def test_a_state_that_disagrees_is_a_desync(stateful: SequenceTable, states, found: str) -> None:
    with pytest.raises(DesyncError, match=found):
        stateful.apply(launched(1, decodes=[(1, 0, 7, 0)], states=states), payload())


def test_states_come_with_slots_only(table: SequenceTable, stateful: SequenceTable) -> None:
    prompt = {"chunks": [(2, 0, 0, 3, 1)], "blocks": [(0, 0, [1])]}
    with pytest.raises(DesyncError, match="no state slot"):
        stateful.apply(launched(1, **prompt), payload(new_sequence(2, [1, 2, 3])))
    with pytest.raises(DesyncError, match="slot 0 of 0"):
        table.apply(launched(1, **prompt, states=[(0, 0, -1, [])]), payload(new_sequence(2, [1, 2, 3])))


def test_tokens_of_a_rank_that_does_not_sample_come_beside_a_later_launch(table: SequenceTable) -> None:
    chunks, blocks = [(1, 0, 0, 4, 0), (2, 0, 0, 3, 1)], [(0, 0, [3, 5]), (1, 0, [6])]
    new = payload(new_sequence(1, list(range(6))), new_sequence(2, [7, 8, 9]))
    table.expect_results(0, table.apply(launched(0, chunks=chunks, blocks=blocks), new))
    # The next chunk of the first one follows at once, before the tokens of the second are known.
    table.expect_results(1, table.apply(launched(1, chunks=[(1, 0, 4, 2, 1)]), payload()))
    told = StepPayload(results=[(0, [[], [50]]), (1, [[60]])])
    rows = table.apply(launched(2, decodes=[(1, 0, 7, 0), (2, 0, 4, 0)]), told)
    assert [row.sequence.token_ids[-1] for row in rows] == [60, 50]
    assert [row.start for row in rows] == [6, 3]


def test_a_token_that_has_not_come_is_a_desync(table: SequenceTable) -> None:
    launch = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [3])])
    table.expect_results(0, table.apply(launch, payload(new_sequence(1, [7, 8, 9]))))
    with pytest.raises(DesyncError, match="4 tokens confirmed with 0 steps in flight, but it had 3 then"):
        table.apply(launched(1, decodes=[(1, 0, 4, 0)]), payload())


def test_results_with_too_few_rows_are_a_desync(table: SequenceTable) -> None:
    launch = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [3])])
    table.expect_results(0, table.apply(launch, payload(new_sequence(1, [7, 8, 9]))))
    with pytest.raises(DesyncError, match="step 0: tokens of 0 rows, it had more"):
        table.apply(launched(1), StepPayload(results=[(0, [])]))


def test_a_step_s_results_are_not_those_of_an_earlier_one_of_its_number(table: SequenceTable) -> None:
    """A warm-up's steps all have one number, and no results."""
    both = [new_sequence(number, [7, 8, 9]) for number in (1, 2)]
    launch = launched(0, chunks=[(1, 0, 0, 3, 1), (2, 0, 0, 3, 1)], blocks=[(0, 0, [3]), (1, 0, [4])])
    table.expect_results(0, table.apply(launch, payload(*both)))
    launch = launched(0, chunks=[(3, 0, 0, 2, 0)], blocks=[(0, 0, [3])], forget=[(1, 0), (2, 0)])
    table.expect_results(0, table.apply(launch, payload(new_sequence(3, [7, 8, 9]))))
    (row,) = table.apply(launched(1, chunks=[(3, 0, 2, 1, 1)]), StepPayload(results=[(0, [[]])]))
    assert row.sequence.token_ids == [7, 8, 9]


def test_results_of_a_sequence_that_has_left_are_dropped(table: SequenceTable) -> None:
    launch = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [3])])
    table.expect_results(0, table.apply(launch, payload(new_sequence(1, [7, 8, 9]))))
    again = StepPayload(new=[new_sequence(1, [1, 2])], results=[(0, [[50]]), (9, [[5]])])
    (row,) = table.apply(launched(1, forget=[(1, 0)], chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [3])]), again)
    assert row.sequence.token_ids == [1, 2]


def test_ends() -> None:
    params = SamplingParams(eos_token_ids=(2,), stop_token_ids=(3, 2))
    assert end_of(params, 1, 0) is None
    assert end_of(params, 2, 0) == "eos"
    assert end_of(params, 3, 0) == "stop_token"
    assert end_of(SamplingParams(eos_token_ids=(2,), ignore_eos=True), 2, 0) is None


def test_nothing_ends_before_min_tokens_even_if_nothing_else_can_be_drawn() -> None:
    params = SamplingParams(eos_token_ids=(2,), stop_token_ids=(3,), min_tokens=2)
    assert [end_of(params, token_id, index) for token_id in (2, 3) for index in (1, 2)] == [
        None, "eos", None, "stop_token",
    ]  # fmt: skip


def test_loads_no_torch() -> None:
    code = "import sys, eventlm.worker.sequence_table\nassert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_blocks_in_several_groups_the_own_ones_are_counted() -> None:
    counted = [SequenceTable(block_size=4, num_blocks=48, own_blocks=range(first, first + 16)) for first in (0, 16, 32)]
    for each in counted:
        each.apply(
            launched(0, chunks=[(1, 0, 0, 8, 1)], blocks=[(0, 0, [18, 35])]), payload(new_sequence(1, list(range(8))))
        )
    assert [each.num_blocks_used for each in counted] == [0, 3, 4]
