"""What a step is written down as."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS
from eventlm.types import ceil_div
from eventlm.worker.gpu.staging import Staging
from eventlm.worker.gpu.step_inputs import Sampled, StepInputs, decode_views, most_numbers, put_decodes, stage_step
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.worker.launches import new_sequence

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def row_of(slot: int, num_tokens: int, *, is_decode: bool) -> Row:
    sequence = WorkerSequence(new_sequence(slot, [1] * num_tokens))
    sequence.slot, sequence.block_table = slot, array("i", [0] * ceil_div(num_tokens, BLOCK_SIZE))
    return Row(sequence, num_tokens - 1, 1, True) if is_decode else Row(sequence, 0, num_tokens, True)


@pytest.mark.parametrize("tile_queries", [0, 1, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("is_decode", [False, True])
def test_the_largest_step_fits(num_rows: int, tile_queries: int, is_decode: bool) -> None:
    max_tokens = 400 * num_rows
    max_blocks = ceil_div(400, BLOCK_SIZE)
    most = most_numbers(max_tokens=max_tokens, max_rows=num_rows, max_blocks=max_blocks, tile_queries=tile_queries)
    staging = Staging(most, 1, CPU)
    rows = [row_of(slot, 400, is_decode=is_decode) for slot in range(num_rows)]
    numbers = list(range(num_rows))
    sampled = Sampled(numbers, np.zeros((num_rows, len(DRAW_COLUMNS)), dtype=np.int32), numbers)
    inputs = stage_step(
        staging,
        rows,
        [(row, 0, list(range(max_blocks))) for row in numbers],
        sampled,
        num_decodes=num_rows if is_decode else 0,
        bucket=num_rows if is_decode else 0,
        tile_queries=tile_queries,
        tiles_decodes=True,
    )
    staging.send()
    assert inputs.forced is not None
    assert inputs.forced.tolist() == numbers
    assert len(inputs.updates) == num_rows * max_blocks


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_decodes_lie_at_addresses_of_one_kind(num_rows: int) -> None:
    staging = Staging(64, 1, CPU)
    staging.begin()
    rows = [row_of(slot, 5, is_decode=True) for slot in range(num_rows)]
    slots, starts = np.arange(num_rows, dtype=np.int32), np.full(num_rows, 4, dtype=np.int32)
    columns = put_decodes(staging, rows, slots, starts, num_rows)
    staging.send()
    for column, view in zip(columns, decode_views(staging, num_rows), strict=True):
        # Kernels are compiled for multiples of 16 bytes, and again for others.
        assert column.data_ptr() == view.data_ptr()
        assert column.data_ptr() % 16 == staging.view(1).data_ptr() % 16
        assert torch.equal(column, view)
    numbers = list(range(num_rows))
    assert [column.tolist() for column in columns[1:]] == [[4] * num_rows, numbers, [5] * num_rows, numbers]


def test_decodes_with_the_longest_contexts_come_first_and_padding_last() -> None:
    rows = [row_of(slot, num_tokens, is_decode=True) for slot, num_tokens in enumerate([3, 9, 9, 5])]
    assert staged(rows, bucket=6).order.tolist() == [1, 2, 3, 0, 4, 5]


def test_of_a_step_with_prompts_only_decodes_are_ordered() -> None:
    rows = [row_of(0, 3, is_decode=True), row_of(1, 9, is_decode=True), row_of(2, 20, is_decode=False)]
    assert staged(rows, bucket=0).order.tolist() == [1, 0]
    assert staged(rows[2:], bucket=0).order.tolist() == []


def staged(rows: list[Row], *, bucket: int) -> StepInputs:
    """A step of rows that decode, then of prompts, none of which samples."""
    staging = Staging(400, 1, CPU)
    num_decodes = sum(row.num_tokens == 1 for row in rows)
    nothing = Sampled([], np.zeros((0, len(DRAW_COLUMNS)), dtype=np.int32), None)
    inputs = stage_step(
        staging, rows, [], nothing, num_decodes=num_decodes, bucket=bucket, tile_queries=8, tiles_decodes=False
    )
    staging.send()
    return inputs
