"""Prefill attention in the interpreter against softmax over what each query sees, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.prefill_attention import make_tiles, prefill_attention, tile_queries
from tests.kernels.gpu.paged import FP8, PagedSequences, attention, extras, paged_sequences

SCALE = 0.2
#: Of |output - reference| / |reference| over a row. Weights are rounded to the cache's type before they multiply
#: values, of fp8 to bfloat16; the output to its own type.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
#: (start, number of queries) of each row.
ROWS = [(0, 1), (0, 15), (16, 1), (0, 17), (299, 1), (90, 45), (127, 3), (0, 0)]


def prefill(q: Tensor, paged: PagedSequences, rows: Sequence[tuple[int, int]], **options: Any) -> Tensor:
    """Output is poisoned before, and q may have more tokens than the rows."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    starts, counts = zip(*rows, strict=True)
    block_m = tile_queries(q.shape[1], paged.kv_cache.shape[2], q.shape[2], paged.kv_cache.dtype)
    prefill_attention(
        q,
        paged.kv_cache,
        paged.kv_scales,
        paged.block_tables,
        paged.slots,
        torch.tensor(starts, dtype=torch.int32, device=q.device),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=q.device),
        torch.from_numpy(make_tiles(starts, counts, block_m)).to(q.device),
        scale=SCALE,
        out_THD=out,
        **options,
    )
    return out


def queries(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A part of wider rows, as of a projection of queries, keys and values together."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(num_tokens, (num_heads + 2) * head_dim, generator=generator).to(device, dtype)
    return wide[:, head_dim:-head_dim].view(num_tokens, num_heads, head_dim)


def assert_close(
    out: Tensor, q: Tensor, paged: PagedSequences, rows: Sequence[tuple[int, int]], **options: Any
) -> None:
    first = 0
    for row, (start, count) in enumerate(rows):
        span = slice(first, first + count)
        expected = attention(q[span], paged.keys[row], paged.values[row], start, SCALE, **options)
        if count:
            error = (out[span].double() - expected).norm() / expected.norm()
            assert error < TOLERANCES[out.dtype], (row, start, count, error)
        first += count
    assert out[first:].isnan().all()


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "block_size", "dtype"),
    [
        (64, 2, 4, 16, torch.bfloat16),
        (128, 1, 8, 32, torch.bfloat16),
        (80, 1, 3, 48, torch.float16),
        (80, 1, 7, 16, FP8),
        (128, 1, 1, 16, FP8),
        (64, 1, 4, 1, torch.bfloat16),
        (96, 1, 1, 7, torch.float32),
        (256, 1, 2, 64, torch.bfloat16),
    ],
)
def test_against_reference(
    head_dim: int, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [start + count for start, count in ROWS]
    paged = paged_sequences(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
    )
    num_tokens = sum(count for _, count in ROWS) + 2
    q = queries(num_tokens, num_kv_heads * group, head_dim, torch.bfloat16 if dtype == FP8 else dtype, device)
    assert_close(prefill(q, paged, ROWS), q, paged, ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_windows_soft_caps_and_sinks(dtype: torch.dtype, device: torch.device) -> None:
    rows = [(0, 1), (299, 1), (90, 45), (0, 0)]
    lengths = [start + count for start, count in rows]
    paged = paged_sequences(lengths, num_kv_heads=1, head_dim=32, block_size=16, dtype=dtype, device=device)
    q = queries(47, 3, 32, torch.bfloat16 if dtype == FP8 else dtype, device)
    for options in extras(3, device):
        assert_close(prefill(q, paged, rows, **options), q, paged, rows, **options)


def test_same_bits_with_a_window_in_chunks(device: torch.device) -> None:
    """A tile may begin before what the last of its queries sees."""
    paged = paged_sequences([190], num_kv_heads=1, head_dim=32, block_size=16, dtype=torch.bfloat16, device=device)
    q = queries(190, 2, 32, torch.bfloat16, device)
    options = {"window": 30, "sinks_H": torch.tensor([0.5, -0.5], device=device)}
    together = prefill(q, paged, [(0, 190)], **options)
    for start, count in ((0, 77), (77, 77), (154, 36), (189, 1), (40, 1)):
        part = slice(start, start + count)
        assert torch.equal(prefill(q[part], paged, [(start, count)], **options), together[part]), (start, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_same_bits_alone_in_a_batch_and_in_chunks(dtype: torch.dtype, device: torch.device) -> None:
    rows = [(0, 9), (0, 190), (70, 1)]
    lengths = [start + count for start, count in rows]
    paged = paged_sequences(lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, device=device)
    q = queries(200, 6, 64, torch.bfloat16, device)
    together = prefill(q, paged, rows)[9:199]
    own, q = paged._replace(slots=paged.slots[1:2]), q[9:199]
    assert torch.equal(prefill(q, own, [(0, 190)]), together)
    for chunk in (1, 64, 77):
        spans = [(start, min(chunk, 190 - start)) for start in range(0 if chunk > 1 else 180, 190, chunk)]
        for start, count in spans:
            part = slice(start, start + count)
            assert torch.equal(prefill(q[part], own, [(start, count)]), together[part]), (start, count)


def test_later_tokens_of_the_cache_are_not_read(device: torch.device) -> None:
    """A chunk's blocks may be followed by any, and those of tokens that come later hold what they held before."""
    paged = paged_sequences([40], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    q = queries(40, 2, 64, torch.bfloat16, device)
    whole = prefill(q, paged, [(0, 40)])
    second, third = paged.block_tables[paged.slots[0].item(), 1:3].tolist()
    paged.kv_cache[:, second, :, 8:] = torch.nan
    paged.kv_cache[:, third] = torch.nan
    assert torch.equal(prefill(q[10:24], paged, [(10, 14)]), whole[10:24])


def test_no_rows(device: torch.device) -> None:
    paged = paged_sequences([4], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    assert prefill(queries(2, 2, 64, torch.bfloat16, device), paged, [(0, 0)]).isnan().all()


def test_tiles() -> None:
    assert make_tiles([0, 100, 7], [70, 1, 32], 32).tolist() == [[1, 0], [0, 64], [0, 32], [2, 0], [0, 0]]
    assert make_tiles([0, 0], [0, 2], 32).tolist() == [[1, 0]]
    tiles = make_tiles([], [], 32)
    assert tiles.shape == (0, 2)
    assert tiles.dtype == np.int32


def test_queries_of_a_tile() -> None:
    assert tile_queries(32, 8, 128, torch.bfloat16) * 4 == 128
    assert tile_queries(14, 2, 64, torch.bfloat16) == 128 // 7
    with pytest.raises(ValueError, match="larger BLOCK_M"):
        tile_queries(256, 1, 128, torch.bfloat16)
