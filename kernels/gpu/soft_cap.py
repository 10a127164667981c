"""Soft caps of attention's scores: cap * tanh(score / cap), as Gemma 2 has them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def soft_cap_factor(CAP: tl.constexpr):
    """What scores, in units of the binary logarithm, are multiplied by for `capped_softly`."""
    return 1.0 / (CAP * 1.4426950408889634)


@triton.jit
def capped_softly(shares, CAP: tl.constexpr):
    """The capped scores, in units of the binary logarithm, of scores divided by the cap."""
    return (2.0 * tl.sigmoid(2.0 * shares) - 1.0) * (CAP * 1.4426950408889634)
