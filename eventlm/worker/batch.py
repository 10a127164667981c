"""Turns the rows of a step into the flat arrays that a decoder runs over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.paged_attention import AttentionRow
from eventlm.worker.sequence_table import Row


class Batch(NamedTuple):
    """A step's inputs: T tokens, row after row.

    token_ids_T, positions_T (in their sequences) and slots_T (in the cache) are int64.
    tails_R: see `tail_slots`.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    tails_R: Tensor
    attention_rows: list[AttentionRow]


def build_batch(rows: Sequence[Row], *, block_size: int, device: torch.device) -> Batch:
    """The arrays of a step. Every row's block table must cover its tokens."""
    counts = np.array([row.num_tokens for row in rows])
    ends = np.cumsum(counts)
    token_ids = np.empty(ends[-1], dtype=np.int64)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - [row.start for row in rows], counts)
    blocks = np.empty(ends[-1], dtype=np.int64)
    attention_rows = []
    for row, end in zip(rows, ends.tolist(), strict=True):
        span = slice(end - row.num_tokens, end)
        # A copy: an array that lends its memory cannot grow.
        table = np.array(row.sequence.block_table, dtype=np.int32)
        token_ids[span] = row.sequence.token_ids[row.start : row.start + row.num_tokens]
        blocks[span] = table[positions[span] // block_size]
        attention_rows.append(AttentionRow(row.start, row.num_tokens, table))

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids_T=tensor(token_ids),
        positions_T=tensor(positions),
        slots_T=tensor(blocks * block_size + positions % block_size),
        tails_R=tensor(tail_slots(rows, block_size)),
        attention_rows=attention_rows,
    )


def tail_slots(rows: Sequence[Row], block_size: int) -> np.ndarray:
    """Slots after the last tokens of rows that enter their last block in this step, up to that block's end; int64."""
    tails = [np.empty(0, dtype=np.int64)]
    for row in rows:
        length = row.start + row.num_tokens
        if length % block_size and row.start <= length - length % block_size:
            first = row.sequence.block_table[length // block_size] * block_size
            tails.append(np.arange(first + length % block_size, first + block_size))
    return np.concatenate(tails)
