"""Floating-point numbers as integers in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def shift_of(dtype: torch.dtype) -> int:
    """Bits at the end that float32 has and numbers of this dtype do not use: `order_keys` can do without them."""
    return {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]


@triton.jit
def order_keys(x, SHIFT: tl.constexpr):
    """Of float32, as int32. Both zeros have the same, and the last `SHIFT` bits, all zero, are left out."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(key, SHIFT: tl.constexpr):
    """The float32 with this key."""
    # What was shifted out of a negative number's key were ones.
    bits = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
