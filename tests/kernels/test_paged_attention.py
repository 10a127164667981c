"""Paged attention against plain softmax over each row, computed in float64."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from eventlm.kernels.kv_quantization import quantize
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


class Options(NamedTuple):
    """What the attention of a layer has beside."""

    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False


OPTIONS = {
    "none": Options(),
    "window": Options(window=7),
    "window of one": Options(window=1),
    "wide window": Options(window=64),
    "soft cap": Options(soft_cap=1.5),
    "sinks": Options(has_sinks=True),
    "all": Options(window=12, soft_cap=2.0, has_sinks=True),
}


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    options: Options = OPTIONS["none"],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [N, H, D] at `start` and on; k, v: [L, K, D]; sinks: [H]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, dim=1), v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    distance = start + torch.arange(len(q))[:, None] - torch.arange(len(k))
    visible = (distance >= 0) & (distance < (options.window or len(k)))
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[:, :, : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v)


class Batch(NamedTuple):
    """Rows with their queries, and a cache of random keys and values."""

    rows: list[AttentionRow]
    q: torch.Tensor
    cache: torch.Tensor
    sinks_H: torch.Tensor


def batch_of(name: str, num_heads: int, num_kv_heads: int, block_size: int) -> Batch:
    head_dim, num_blocks = 8, 600
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
    q = torch.randn(sum(row.num_tokens for row in rows), num_heads, head_dim, generator=generator)
    return Batch(rows, q, cache, torch.randn(num_heads, generator=generator))


def check(batch: Batch, options: Options, *, stored: torch.dtype | None = None, tolerance: float = 1e-5) -> None:
    """Compare with the reference; stored: of a quantized cache."""
    scale = 0.3
    rows, q, cache, sinks_H = batch
    sinks = sinks_H if options.has_sinks else None
    kv_cache = cache if stored is None else quantize(cache, stored)
    out = paged_attention(
        q,
        kv_cache,
        # As for a model whose layers differ.
        plan_attention(rows, kv_cache, q.dtype, sorted({0, 5, options.window})),
        scale=scale,
        window=options.window,
        soft_cap=options.soft_cap,
        sinks_H=sinks,
    )
    assert out.dtype == q.dtype
    offset = 0
    for row in rows:
        blocks = torch.from_numpy(row.block_table).long()
        length = row.start + row.num_tokens
        k, v = (part[blocks].transpose(1, 2).flatten(0, 1)[:length] for part in cache)
        span = slice(offset, offset + row.num_tokens)
        expected = reference(q[span], k, v, row.start, scale, options, sinks)
        torch.testing.assert_close(out[span].double(), expected, rtol=0, atol=tolerance, msg=str(row))
        offset += row.num_tokens


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(6, 2, 4), (3, 3, 16), (4, 1, 1), (8, 4, 7)])
def test_against_reference(name: str, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    check(batch_of(name, num_heads, num_kv_heads, block_size), Options())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_windows_soft_caps_and_sinks(name: str, options: str) -> None:
    check(batch_of(name, 6, 2, 4), OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_of_quantized_keys_and_values(stored: torch.dtype, options: str) -> None:
    check(batch_of("mixed", 6, 2, 4), OPTIONS[options], stored=stored, tolerance=0.15)


@pytest.mark.parametrize("options", OPTIONS)
def test_in_bfloat16(options: str) -> None:
    rows, q, cache, sinks_H = batch_of("mixed", 6, 2, 4)
    check(Batch(rows, q.bfloat16(), cache.bfloat16(), sinks_H.bfloat16()), OPTIONS[options], tolerance=0.03)


def test_a_window_has_one_mask_for_all_layers() -> None:
    batch = batch_of("mixed", 6, 2, 4)
    for group in plan_attention(batch.rows, batch.cache, windows=(0, 7)):
        assert set(group.masks) == {0, 7}
    (group,) = plan_attention([AttentionRow(0, 8, np.arange(9, dtype=np.int32))], batch.cache, windows=(0, 7, 8))
    assert [window for window, mask in group.masks.items() if mask is not None] == [7]


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
