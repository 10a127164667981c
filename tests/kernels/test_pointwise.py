from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eventlm.kernels.pointwise import rms_norm, rotary_embedding, silu_mul


@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 33)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_norms_against_float64(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 4).to(dtype)
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), exact, atol=tolerance)


def test_norms_of_zeros_stay_zeros() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_rotations_against_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 16, generator=generator)
    angles = torch.rand(9, 8, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    expected, _ = apply_rotary_pos_emb(x, x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    signed = torch.cat((-sin, sin), -1)
    out = rotary_embedding(x, torch.cat((cos, cos), -1).unsqueeze(1), signed.unsqueeze(1))
    assert torch.allclose(out, expected, atol=1e-6)


def test_a_rotation_keeps_lengths() -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    angles = torch.full((4, 1, 4), 0.7)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin()
    out = rotary_embedding(x, cos, torch.cat((-sin, sin), -1))
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (5, 34), (2, 3, 128)])
def test_gate_comes_first(shape: tuple[int, ...]) -> None:
    gate_up = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = gate_up.clone()
    half = shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    assert torch.allclose(silu_mul(gate_up).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-6)
    assert torch.equal(gate_up, before)
