"""Tensors for tests of kernels, and what it is for two to be alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: How many times the distance of 1 and the next larger number two results of that size may differ.
_STEPS_APART = {torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Tensor:
    """Normal numbers, the same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class RowsApart(NamedTuple):
    """`rows` in a larger tensor, of which all else is NaN."""

    rows: Tensor
    whole: Tensor

    def rest_is_nan(self) -> bool:
        """Whether nothing was written beside the rows."""
        rest = torch.ones(self.whole.shape, dtype=torch.bool, device=self.whole.device)
        rest[1:-1, 16 : 16 + self.rows.shape[1]] = False
        return bool(self.whole[rest].isnan().all())


def rows_apart(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> RowsApart:
    """Normal numbers with NaN before, between and behind the rows."""
    whole = torch.full((shape[0] + 2, shape[1] + 21), torch.nan, dtype=dtype, device=device)
    rows = whole[1:-1, 16 : 16 + shape[1]]
    rows.copy_(random(shape, dtype, device, seed=seed))
    return RowsApart(rows, whole)


def assert_rounded_alike(actual: Tensor, expected: Tensor, *, differing: float = 0.02) -> None:
    """Equal but for the last bit or two, and that only in one of 50 numbers: sums are taken in another order.

    Rounding hides most of that, but not in float32, of which all numbers may differ in their last bits.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    eps = torch.finfo(expected.dtype).eps
    steps = _STEPS_APART[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=steps * eps, atol=steps * eps)
    if expected.dtype != torch.float32:
        assert (actual != expected).float().mean() <= differing
