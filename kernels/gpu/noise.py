"""Keyed Gumbel noise inside kernels: that of `eventlm/worker/sampling/noise.py`, with logarithms rounded otherwise."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def negative_gumbel_noise(ids, key_0, key_1):
    """Noise of token ids under a row's two keys, all int32, with its sign changed, float32: subtract it."""
    bits = ids.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16) ^ key_0.to(tl.uint32, bitcast=True)
    bits = bits * 0x21F0AAAD
    # The sign moves in from the left, here and below.
    bits = bits ^ (bits.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)
    bits = (bits ^ key_1.to(tl.uint32, bitcast=True)) * 0x735A2D97
    signed = bits.to(tl.int32, bitcast=True)
    number = signed ^ (signed >> 16)
    # A bit below 2^-31, so that the largest 31-bit integer, rounded up, stays below 1.
    uniform = (number.to(tl.float32) + 0.5) * 4.656612595521636e-10
    return _log(-_log1p(-uniform))


@triton.jit
def _log(x):
    """Natural logarithm of positive normal numbers, to some units in the last place. Triton's is slower."""
    # x = (1 + rest) * 2^exponent, with rest between -1/3 and 1/3.
    bits = x.to(tl.int32, bitcast=True)
    shifted = (bits - 0x3F2AAAAB) & -0x800000
    return _log_of_parts((bits - shifted).to(tl.float32, bitcast=True) - 1.0, shifted)


@triton.jit
def _log1p(x):
    """The same of 1 + x, without losing what is small, for x between -1 and 0."""
    shifted = ((1.0 + x).to(tl.int32, bitcast=True) - 0x3F2AAAAB) & -0x800000
    scale = (0x3F800000 - shifted).to(tl.float32, bitcast=True)
    return _log_of_parts(x * scale + (scale - 1.0), shifted)


@triton.jit
def _log_of_parts(rest, shifted):
    # The best polynomial of its degree for log(1 + rest).
    p = 0.13838342 * rest - 0.15140387
    p = p * rest + 0.14039221
    p = p * rest - 0.16469736
    p = p * rest + 0.20008066
    p = p * rest - 0.25004321
    p = p * rest + 0.33333266
    p = (p * rest - 0.5) * (rest * rest) + rest
    return (shifted >> 23).to(tl.float32) * 0.6931472 + p
