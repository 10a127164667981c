"""Paged attention against plain softmax over each row, computed in float64."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention

#: (start, num_tokens) of each row.
BATCHES = {
    "one decode": [(30, 1)],
    "first token": [(0, 1)],
    "equal decodes": [(17, 1)] * 5,
    "ragged decodes": [(0, 1), (1, 1), (15, 1), (16, 1), (99, 1), (64, 1)],
    "whole prompt": [(0, 29)],
    "equal prompts": [(0, 8)] * 3,
    "ragged prompts": [(0, 5), (0, 8), (0, 31), (0, 2)],
    "chunk": [(13, 11)],
    "chunks": [(13, 11), (4, 15), (90, 9), (0, 12), (3, 2)],
    "prompt and chunks of its shape": [(0, 8), (1, 5), (3, 5)],
    "mixed": [(20, 1), (0, 17), (33, 1), (8, 8), (95, 5), (0, 1)],
}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """q: [N, H, D] at `start` and on; k, v: [L, K, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, dim=1), v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    visible = torch.arange(len(k)) <= start + torch.arange(len(q))[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(6, 2, 4), (3, 3, 16), (4, 1, 1), (8, 4, 7)])
def test_against_reference(name: str, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    head_dim, num_blocks, scale = 8, 600, 0.3
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, num_blocks, num_kv_heads, block_size, head_dim, generator=generator)
    free = iter(random.Random(2).sample(range(num_blocks), num_blocks))
    rows = [
        AttentionRow(
            start,
            num_tokens,
            # One block more than is needed, as a sequence that grows has.
            np.array(list(itertools.islice(free, -(-(start + num_tokens) // block_size) + 1)), dtype=np.int32),
        )
        for start, num_tokens in BATCHES[name]
    ]
    num_tokens = sum(row.num_tokens for row in rows)
    q = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    out = paged_attention(q, cache, plan_attention(rows, cache), scale=scale)
    offset = 0
    for row in rows:
        blocks = torch.from_numpy(row.block_table).long()
        length = row.start + row.num_tokens
        k, v = (part[blocks].transpose(1, 2).flatten(0, 1)[:length] for part in cache)
        span = slice(offset, offset + row.num_tokens)
        expected = reference(q[span], k, v, row.start, scale)
        assert torch.allclose(out[span].double(), expected, atol=1e-5), row
        offset += row.num_tokens


def test_rows_are_grouped_by_shape() -> None:
    cache = torch.zeros(2, 64, 1, 4, 8)
    table = np.arange(64, dtype=np.int32)
    rows = [AttentionRow(50 + number, 1, table) for number in range(8)]
    rows += [AttentionRow(200, 1, table), AttentionRow(0, 40, table)]
    groups = plan_attention(rows, cache)
    assert [(group.num_rows, group.num_queries, group.num_context) for group in groups] == [
        (8, 1, 58),
        (1, 1, 201),
        (1, 40, 40),
    ]
