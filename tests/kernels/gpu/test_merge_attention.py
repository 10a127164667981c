"""Merging of partial attentions in the interpreter against float64, and against attention over the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.references import merge_attention_reference
from eventlm.kernels.gpu.merge_attention import merge_attention


def parts(num_rows: int, num_heads: int, num_parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Some of them empty and then poisoned; the first row's all."""
    generator = torch.Generator().manual_seed(1)
    partial = torch.randn(num_rows, num_heads, num_parts, head_dim, generator=generator)
    lse = 20 * torch.randn(num_rows, num_heads, num_parts, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -torch.inf
    lse[0] = -torch.inf
    partial[lse.isneginf()] = torch.nan
    return partial.to(device), lse.to(device)


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_parts", "head_dim", "dtype"),
    [
        (3, 2, 2, 64, torch.bfloat16),
        (2, 3, 5, 80, torch.float16),
        (2, 1, 64, 128, torch.float32),
        (2, 2, 1, 96, torch.float32),
    ],
)
def test_against_reference(
    num_rows: int, num_heads: int, num_parts: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    partial, lse = parts(num_rows, num_heads, num_parts, head_dim, device)
    out = torch.full((num_rows, num_heads, head_dim), torch.nan, dtype=dtype, device=device)
    merged = torch.full((num_rows, num_heads), torch.nan, device=device)
    merge_attention(partial, lse, out, merged)
    expected, expected_lse = torch.empty(out.shape, device=device), torch.empty(merged.shape, device=device)
    merge_attention_reference(partial, lse, expected, expected_lse)
    torch.testing.assert_close(out.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(merged, expected_lse)
    assert not out[0].any()
    assert merged[0].isneginf().all()


def test_without_log_sum_exp(device: torch.device) -> None:
    partial, lse = parts(2, 2, 4, 64, device)
    out, expected = torch.empty(2, 2, 64, device=device), torch.empty(2, 2, 64, device=device)
    merge_attention(partial, lse, out)
    merge_attention(partial, lse, expected, torch.empty(2, 2, device=device))
    assert torch.equal(out, expected)


def test_parts_one_after_the_other(device: torch.device) -> None:
    """As they come from several devices: [S, R, H, D]."""
    partial, lse = parts(2, 3, 4, 64, device)
    apart, apart_lse = partial.permute(2, 0, 1, 3).contiguous(), lse.permute(2, 0, 1).contiguous()
    out, expected = torch.empty(2, 3, 64, device=device), torch.empty(2, 3, 64, device=device)
    merge_attention(apart.permute(1, 2, 0, 3), apart_lse.permute(1, 2, 0), out)
    merge_attention(partial, lse, expected)
    assert torch.equal(out, expected)


def test_merged_of_merged(device: torch.device) -> None:
    """Merging in steps, as devices do, gives the same."""
    partial, lse = parts(3, 2, 6, 64, device)
    halves, lses = torch.empty(3, 2, 2, 64, device=device), torch.empty(3, 2, 2, device=device)
    for half, span in enumerate((slice(0, 4), slice(4, 6))):
        merge_attention(partial[:, :, span], lse[:, :, span], halves[:, :, half], lses[:, :, half])
    out, expected = torch.empty(3, 2, 64, device=device), torch.empty(3, 2, 64, device=device)
    out_lse, expected_lse = torch.empty(3, 2, device=device), torch.empty(3, 2, device=device)
    merge_attention(halves, lses, out, out_lse)
    merge_attention(partial, lse, expected, expected_lse)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out_lse, expected_lse)
