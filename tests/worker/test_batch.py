from __future__ import annotations

from array import array

import torch

from eventlm.worker.batch import build_batch, tail_slots
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.worker.launches import new_sequence

BLOCK_SIZE = 4


def row(token_ids: list[int], blocks: list[int], *, start: int, num_tokens: int) -> Row:
    sequence = WorkerSequence(new_sequence(0, token_ids))
    sequence.block_table = array("i", blocks)
    return Row(sequence, start, num_tokens, True)


def test_rows_lie_after_each_other() -> None:
    rows = [
        row(list(range(10, 16)), [7, 3], start=0, num_tokens=6),
        row(list(range(20, 29)), [2, 0, 9], start=8, num_tokens=1),
        row(list(range(30, 37)), [5, 6], start=3, num_tokens=3),
    ]
    batch = build_batch(rows, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    assert batch.token_ids_T.tolist() == [*range(10, 16), 28, 33, 34, 35]
    assert batch.positions_T.tolist() == [*range(6), 8, 3, 4, 5]
    assert batch.slots_T.tolist() == [28, 29, 30, 31, 12, 13, 36, 23, 24, 25]
    assert {tensor.dtype for tensor in batch[:4]} == {torch.int64}
    assert [(each[0], each[1], each[2].tolist()) for each in batch.attention_rows] == [
        (0, 6, [7, 3]),
        (8, 1, [2, 0, 9]),
        (3, 3, [5, 6]),
    ]
    # The block table may grow while the batch is used.
    rows[0].sequence.block_table.append(1)


def test_tails_are_those_of_blocks_that_are_entered() -> None:
    tokens = list(range(12))
    assert tail_slots([row(tokens, [5], start=0, num_tokens=3)], BLOCK_SIZE).tolist() == [23]
    assert tail_slots([row(tokens, [5, 1], start=0, num_tokens=5)], BLOCK_SIZE).tolist() == [5, 6, 7]
    # One that was entered before, and one that is full.
    assert tail_slots([row(tokens, [5, 1], start=5, num_tokens=1)], BLOCK_SIZE).tolist() == []
    assert tail_slots([row(tokens, [5, 1], start=4, num_tokens=4)], BLOCK_SIZE).tolist() == []
    assert tail_slots([row(tokens, [5, 1], start=4, num_tokens=1)], BLOCK_SIZE).tolist() == [5, 6, 7]
    assert tail_slots([], BLOCK_SIZE).tolist() == []
