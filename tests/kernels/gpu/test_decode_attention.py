"""Decode attention in the interpreter against softmax over each row's context in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.decode_attention import SplitScratch, decode_attention, num_splits
from tests.kernels.gpu.paged import FP8, PagedSequences, attention, extras, paged_sequences

SCALE = 0.2
#: Of |output - reference| / |reference| over a row's heads. Weights are rounded to the cache's type before they
#: multiply values, of fp8 to float16; the output to its own type.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}


def decode(
    q: Tensor,
    paged: PagedSequences,
    lengths: Sequence[int],
    splits: int,
    order: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """With output and scratch poisoned before; without `order` the last row first."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    scratch = SplitScratch((len(q) + 1) * splits, q.shape[1], q.shape[2], q.device)
    parts = scratch.of_step(len(q), splits)
    for part in parts or ():
        part.fill_(torch.nan)
    decode_attention(
        q,
        paged.kv_cache,
        paged.kv_scales,
        paged.block_tables,
        paged.slots,
        torch.tensor(lengths, dtype=torch.int32, device=q.device),
        torch.tensor(order or range(len(q))[::-1], dtype=torch.int32, device=q.device),
        scale=SCALE,
        num_splits=splits,
        parts=parts,
        out_RHD=out,
        **options,
    )
    return out


def queries(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A part of wider rows, as of a projection of queries, keys and values together."""
    wide = torch.randn(num_rows, (num_heads + 2) * head_dim, generator=torch.Generator().manual_seed(3)).to(
        device, dtype
    )
    return wide[:, head_dim:-head_dim].view(num_rows, num_heads, head_dim)


def assert_close(out: Tensor, q: Tensor, paged: PagedSequences, lengths: Sequence[int], **options: Any) -> None:
    for row, length in enumerate(lengths):
        if not length:
            assert not out[row].any()
            continue
        expected = attention(q[row : row + 1], paged.keys[row], paged.values[row], length - 1, SCALE, **options)[0]
        error = (out[row].double() - expected).norm() / expected.norm()
        assert error < TOLERANCES[out.dtype], (row, length, error)


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "block_size", "dtype", "splits"),
    [
        (64, 2, 4, 16, torch.bfloat16, 1),
        (128, 1, 8, 32, torch.bfloat16, 4),
        (80, 2, 3, 48, torch.float16, 2),
        (80, 1, 7, 16, FP8, 1),
        (128, 2, 1, 16, FP8, 8),
        (64, 1, 4, 1, FP8, 2),
        (32, 1, 20, 16, torch.bfloat16, 2),
        (96, 1, 1, 7, torch.float32, 4),
        (256, 1, 2, 64, torch.bfloat16, 2),
    ],
)
def test_against_reference(
    head_dim: int, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype, splits: int, device: torch.device
) -> None:
    lengths = [1, 0, 15, 16, 17, 300, 0]
    paged = paged_sequences(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device
    )
    q = queries(len(lengths), num_kv_heads * group, head_dim, torch.bfloat16 if dtype == FP8 else dtype, device)
    assert_close(decode(q, paged, lengths, splits), q, paged, lengths)


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float32, 1), (torch.float32, 4), (FP8, 2)])
def test_windows_soft_caps_and_sinks(dtype: torch.dtype, splits: int, device: torch.device) -> None:
    lengths = [1, 0, 17, 300]
    paged = paged_sequences(lengths, num_kv_heads=1, head_dim=32, block_size=16, dtype=dtype, device=device)
    q = queries(len(lengths), 3, 32, torch.bfloat16 if dtype == FP8 else dtype, device)
    for options in extras(3, device):
        assert_close(decode(q, paged, lengths, splits, **options), q, paged, lengths, **options)


def test_fp8_of_any_size(device: torch.device) -> None:
    """Neither large queries nor small values leave what the products can hold."""
    lengths = [70]
    paged = paged_sequences(lengths, num_kv_heads=1, head_dim=64, block_size=16, dtype=FP8, device=device)
    assert paged.kv_scales is not None
    paged.kv_scales[0] *= 1e-6
    paged.kv_scales[1] *= 1e-7
    q = queries(1, 4, 64, torch.bfloat16, device) * 1e6
    scaled = paged._replace(keys=[paged.keys[0] * 1e-6], values=[paged.values[0] * 1e-7])
    assert_close(decode(q, paged, lengths, 1), q, scaled, lengths)


def test_row_alone_and_among_others(device: torch.device) -> None:
    lengths = [130, 5, 0, 64]
    paged = paged_sequences(lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    q = queries(4, 4, 64, torch.bfloat16, device)
    together = decode(q, paged, lengths, 2)
    for row in range(4):
        one = slice(row, row + 1)
        alone = decode(q[one], paged._replace(slots=paged.slots[one]), lengths[one], 2)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("splits", [1, 4])
def test_no_order_of_rows_changes_a_bit(splits: int, device: torch.device) -> None:
    lengths = [130, 5, 0, 64]
    paged = paged_sequences(lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    q = queries(4, 4, 64, torch.bfloat16, device)
    as_they_come = decode(q, paged, lengths, splits, [0, 1, 2, 3])
    assert torch.equal(decode(q, paged, lengths, splits, [2, 0, 3, 1]), as_they_come)
    assert torch.equal(decode(q, paged, lengths, splits, [0, 3, 1, 2]), as_they_come)


def test_no_rows(device: torch.device) -> None:
    paged = paged_sequences([4], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    assert decode(queries(0, 2, 64, torch.bfloat16, device), paged, [], 2).shape == (0, 2, 64)


def test_room_for_the_splits_is_asked_for(device: torch.device) -> None:
    paged = paged_sequences([4], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16, device=device)
    q = queries(1, 2, 64, torch.bfloat16, device)
    lengths = torch.tensor([4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="SplitScratch"):
        decode_attention(
            q, paged.kv_cache, None, paged.block_tables, paged.slots, lengths, torch.zeros_like(lengths),
            scale=1.0, num_splits=2, parts=None, out_RHD=torch.empty_like(q),
        )  # fmt: skip


def test_steps_have_the_same_room_one_after_the_other() -> None:
    scratch = SplitScratch(12, 3, 32, "cpu")
    first, second = scratch.of_step(3, 4), scratch.of_step(6, 2)
    assert first is not None
    assert second is not None
    assert (first.partial.shape, first.lse.shape) == ((3, 3, 4, 32), (3, 3, 4))
    assert (second.partial.shape, second.lse.shape) == ((6, 3, 2, 32), (6, 3, 2))
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(first, second, strict=True))
    assert scratch.of_step(12, 1) is None


def test_number_of_splits() -> None:
    assert num_splits(1, 8, 132, 8192) == 64
    assert num_splits(64, 8, 132, 8192) == 2
    assert num_splits(256, 8, 132, 8192) == 1
    assert num_splits(1, 8, 132, 300) == 4
    assert num_splits(1, 1, 132, 127) == 1
    assert num_splits(0, 8, 132, 0) == 1
    for rows, heads, context in itertools.product((1, 2, 3, 7, 100), (1, 2, 8), (1, 100, 4000, 1 << 20)):
        splits = num_splits(rows, heads, 132, context)
        assert splits in {1, 2, 4, 8, 16, 32, 64}
        assert splits == 1 or splits * 64 <= context
