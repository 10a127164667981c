"""Merging the splits of decode attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import merge_attention_reference
from eventlm.kernels.gpu.merge_attention import merge_attention


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """32 heads of 128, (rows, splits)."""
    for num_rows, num_splits in [(2, 4)] if smoke else [(1, 64), (64, 2), (64, 16), (256, 2)]:
        yield _case(num_rows, 2 if smoke else 32, num_splits, 128, device)


def _case(num_rows: int, num_heads: int, num_splits: int, head_dim: int, device: torch.device) -> KernelCase:
    partial = torch.randn(num_rows, num_heads, num_splits, head_dim, device=device)
    lse = torch.randn(num_rows, num_heads, num_splits, device=device)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=device)

    def run() -> Tensor:
        merge_attention(partial, lse, out)
        return out

    def reference() -> Tensor:
        expected = torch.empty(out.shape, device=device)
        merge_attention_reference(partial, lse, expected)
        return expected

    num_bytes = partial.nbytes + lse.nbytes + out.nbytes
    return KernelCase(f"{num_rows} rows of {num_splits} splits", run, reference, num_bytes)
