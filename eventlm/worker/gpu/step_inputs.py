"""What a step's launch becomes on the device: tokens, positions, rows, and what changes in the block tables.

A step that only decodes lies at the same address for all steps of its size, padded to the size of a CUDA graph if it is
to be one's. Shapes: T tokens, R rows, S of them sample, U writes into block tables.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from torch import Tensor

from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS
from eventlm.kernels.gpu.prefill_attention import make_tiles
from eventlm.worker.gpu.staging import ALIGNMENT, Staging, aligned
from eventlm.worker.sequence_table import Row

#: Of a decode's padding: it belongs to no sequence.
_NO_SLOT = -1
_COLUMNS = 5


class StepInputs(NamedTuple):
    """On the device, int32; they are there once the staging buffer is sent.

    num_decodes: rows that decode, padding included; they come first. tokens, positions, token_slots [T]; slots, lengths
    [R]; order [num_decodes] of these rows, the longest first. Of a step with prompts also starts [R], query_starts
    [R + 1] and tiles [N, 2], else None. updates: [U, 3] of (slot, index, block). sampled: rows [S] that sample
    after their last tokens, by the positions of these tokens in the step; sampled_slots [S] of their sequences; params
    [S, 6], see `GpuSampler.stage`; forced [S], or None.
    """

    num_decodes: int
    tokens: Tensor
    positions: Tensor
    token_slots: Tensor
    slots: Tensor
    lengths: Tensor
    order: Tensor
    starts: Tensor | None
    query_starts: Tensor | None
    tiles: Tensor | None
    updates: Tensor
    sampled: Tensor
    sampled_slots: Tensor
    params: Tensor
    forced: Tensor | None


class Sampled(NamedTuple):
    """The rows that sample: their numbers, parameters int32 [S, 6], and what they go on with if that is forced."""

    numbers: list[int]
    params: np.ndarray
    forced: list[int] | None


def stage_step(
    staging: Staging,
    rows: Seq[Row],
    blocks: Seq[tuple[int, int, list[int]]],
    sampled: Sampled,
    *,
    num_decodes: int,
    bucket: int,
    tile_queries: int,
    tiles_decodes: bool,
) -> StepInputs:
    """Write a step down. `blocks` as in its launch; bucket 0: no padding. Nothing is sent yet."""
    staging.begin()
    slots = np.array([row.sequence.slot for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    if num_decodes == len(rows):
        columns = put_decodes(staging, rows, slots, starts, max(bucket, len(rows)))
        tokens, positions, token_slots, lengths, order = columns
        prompts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        slots_R, num_decodes = token_slots, max(bucket, len(rows))
        token_places = np.arange(len(rows), dtype=np.int32)
    else:
        counts = np.array([row.num_tokens for row in rows], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        query_starts = np.concatenate(([0], ends)).astype(np.int32)
        ids = [token for row in rows for token in row.sequence.token_ids[row.start : row.start + row.num_tokens]]
        tokens = staging.put(np.array(ids, dtype=np.int32))
        positions = staging.put(np.arange(ends[-1], dtype=np.int32) - np.repeat(query_starts[:-1] - starts, counts))
        token_slots, slots_R = staging.put(np.repeat(slots, counts)), staging.put(slots)
        lengths, order = staging.put(starts + counts), staging.put(_longest_first(starts[:num_decodes]))
        tiles = None
        if tile_queries:
            first = 0 if tiles_decodes else num_decodes
            found = make_tiles(starts[first:].tolist(), counts[first:].tolist(), tile_queries)
            found[:, 0] += first
            tiles = staging.put(found)
        prompts = (staging.put(starts), staging.put(query_starts), tiles)
        token_places = ends - 1
    return StepInputs(
        num_decodes,
        tokens,
        positions,
        token_slots,
        slots_R,
        lengths,
        order,
        *prompts,
        updates=staging.put(_updates(slots, blocks)),
        sampled=staging.put(token_places[sampled.numbers]),
        sampled_slots=staging.put(slots[sampled.numbers]),
        params=staging.put(sampled.params),
        forced=None if sampled.forced is None else staging.put(np.array(sampled.forced, dtype=np.int32)),
    )


def most_numbers(*, max_tokens: int, max_rows: int, max_blocks: int, tile_queries: int) -> int:
    """Room that any step within these limits has enough of, for `Staging`; `max_blocks`: of a row's block table."""
    num_tiles = max_rows + max_tokens // tile_queries if tile_queries else 0
    # Of each row: slot, length, position in the order, start, start of its queries, what is sampled and its slot, how,
    # and what is forced.
    of_rows = max_rows * (8 + len(DRAW_COLUMNS)) + 1
    num_parts = len(StepInputs._fields)
    return 3 * max_tokens + of_rows + 2 * num_tiles + 3 * max_rows * max_blocks + (num_parts + _COLUMNS) * ALIGNMENT


def decode_views(staging: Staging, num_rows: int) -> list[Tensor]:
    """Where tokens, positions, slots, lengths and order lie of a step that only decodes `num_rows`, with padding."""
    return [column[:num_rows] for column in staging.view(_COLUMNS, aligned(num_rows)).unbind()]


def put_decodes(
    staging: Staging, rows: Seq[Row], slots: np.ndarray, starts: np.ndarray, num_padded: int
) -> list[Tensor]:
    """Tokens, positions, slots, lengths and order of rows that decode, and of what pads them, which is last."""
    columns = np.zeros((_COLUMNS, aligned(num_padded)), dtype=np.int32)
    num_rows = len(rows)
    columns[0, :num_rows] = [row.sequence.token_ids[row.start] for row in rows]
    columns[1, :num_rows] = starts
    columns[2] = _NO_SLOT
    columns[2, :num_rows] = slots
    columns[3, :num_rows] = starts + 1
    columns[4] = np.arange(columns.shape[1])
    columns[4, :num_rows] = _longest_first(starts)
    return [column[:num_padded] for column in staging.put(columns).unbind()]


def _longest_first(starts: np.ndarray) -> np.ndarray:
    """The rows' numbers by falling length of context."""
    return np.argsort(-starts, kind="stable").astype(np.int32)


def _updates(slots: np.ndarray, blocks: Seq[tuple[int, int, list[int]]]) -> np.ndarray:
    parts = [np.empty((0, 3), dtype=np.int32)]
    for row, index, numbers in blocks:
        part = np.empty((len(numbers), 3), dtype=np.int32)
        part[:, 0] = slots[row]
        part[:, 1] = np.arange(index, index + len(numbers))
        part[:, 2] = numbers
        parts.append(part)
    return np.concatenate(parts)
