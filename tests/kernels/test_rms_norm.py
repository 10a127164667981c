from __future__ import annotations

import pytest
import torch

from eventlm.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 33)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 4).to(dtype)
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), exact, atol=tolerance)


def test_zeros_stay_zeros() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()
