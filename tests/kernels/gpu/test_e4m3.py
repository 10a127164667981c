"""Unpacking of fp8 pairs: all numbers there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eventlm.kernels.gpu.e4m3 import E4M3_UNIT, unpack_e4m3


@triton.jit
def _unpack(pairs, even, odd, N: tl.constexpr):
    indices = tl.arange(0, N)
    first, second = unpack_e4m3(tl.load(pairs + indices))
    tl.store(even + indices, first)
    tl.store(odd + indices, second)


def test_every_number(device: torch.device) -> None:
    values = torch.arange(256, dtype=torch.uint8, device=device)
    pairs = torch.stack((values, values.flip(0)), dim=1)
    even, odd = torch.empty(2, 256, dtype=torch.float16, device=device)
    _unpack[(1,)](pairs.view(torch.int16).view(-1), even, odd, N=256)
    expected = pairs.view(torch.float8_e4m3fn).float()
    # NaN becomes a number, but no cache holds it: what stores there keeps NaN in the scales.
    real = expected.isfinite()
    for part, given in enumerate((even, odd)):
        assert torch.equal(given.float()[real[:, part]] * E4M3_UNIT.value, expected[:, part][real[:, part]])
