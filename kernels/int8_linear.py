"""Products of 8-bit integers (W8A8): weights have a scale for each output, activations for each token.

A row is rotated by a Hadamard matrix in blocks of 64 (QuaRot, Ashkboos et al., 2024), which spreads its few large
numbers and leaves products of two rows as they are, then divided by its largest magnitude over 127 and rounded. Sums of
products are exact int32. Shapes: T tokens, N outputs, K inputs, B inputs padded with zeros to whole blocks.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from eventlm.kernels.cpu.native import processor_flags

#: Numbers that are rotated together.
BLOCK = 64
#: Without one of them, the library's product of bytes adds two in 16 bits, which is too few.
_EXACT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x [T, K] as int8 [T, B] in -127 to 127, and what its integers are multiples of, float32 [T].

    That is a NaN where a number of the row is not finite, and rows without one above 1e-30 are zeros.
    """
    rotated = _rotate(torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % BLOCK)))
    largest = rotated.abs().amax(-1)
    inverse = torch.where(largest > 1e-30, 127 / largest, 0.0)
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return (rotated * inverse[:, None]).round().to(torch.int8), scales


def dequantize_rows(values: Tensor, scales: Tensor, num_inputs: int) -> Tensor:
    """What `quantize_rows` has rounded, float32 [T, K], of int8 [T, B] and float32 [T]."""
    return _rotate(values * scales[:, None])[:, :num_inputs]


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] times the quantized `weight` [N, B] with its `scales` [N], plus bias [N]; [T, N] in x's dtype."""
    values, row_scales = quantize_rows(x)
    out = _sums(values, weight) * (row_scales[:, None] * scales)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _sums(values: Tensor, weight: Tensor) -> Tensor:
    """int8 [T, B] times int8 [N, B], float32 [T, N]."""
    if _EXACT_PRODUCTS & processor_flags():
        sums: Tensor = torch._int_mm(values, weight.t())
        return sums.float()
    return torch.nn.functional.linear(values.float(), weight.float())


def _rotate(x: Tensor) -> Tensor:
    """Its own inverse; x [T, B] float32."""
    rotated: Tensor = x.unflatten(-1, (-1, BLOCK)) @ _hadamard()
    return rotated.flatten(-2)


@functools.cache
def _hadamard() -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(BLOCK)
