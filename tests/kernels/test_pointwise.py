from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eventlm.kernels.pointwise import activate, activate_gated, cap_softly, layer_norm, rms_norm, rotary_embedding


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


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_layer_norms_against_float64(dtype: torch.dtype, tolerance: float, has_weight: bool, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 5, 33, generator=generator) * 4 + 1).to(dtype)
    weight = torch.rand(33, generator=generator).to(dtype) if has_weight else None
    bias = torch.randn(33, generator=generator).to(dtype) if has_bias else None
    wide = x.double()
    exact = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    exact = exact * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())
    out = layer_norm(x, weight, bias, 1e-5)
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


def test_interleaved_rotations_against_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 16, generator=generator)
    angles = torch.rand(9, 8, generator=generator) * 6
    cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)
    expected, _ = modeling_cohere.apply_rotary_pos_emb(x, x, cos, sin)
    signed = torch.stack((-angles.sin(), angles.sin()), -1).flatten(1)
    out = rotary_embedding(x, cos.unsqueeze(1), signed.unsqueeze(1), is_interleaved=True)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_what_lies_behind_the_rotated_elements_stays(is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 16, generator=generator)
    cos, sin = torch.randn(2, 9, 1, 6, generator=generator)
    out = rotary_embedding(x, cos, sin, is_interleaved)
    assert torch.equal(out[..., :6], rotary_embedding(x[..., :6], cos, sin, is_interleaved))
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_a_rotation_keeps_lengths() -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    angles = torch.full((4, 1, 4), 0.7)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin()
    out = rotary_embedding(x, cos, torch.cat((-sin, sin), -1))
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("shape", [(1, 2), (5, 34), (2, 3, 128)])
def test_activations_against_transformers(shape: tuple[int, ...], name: str) -> None:
    gate_up = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    before = gate_up.clone()
    half = shape[-1] // 2
    expected = ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name](gate_up.double())
    torch.testing.assert_close(activate(gate_up, name).double(), expected, atol=1e-6, rtol=1e-6)
    # The gate comes first.
    gated = expected[..., :half] * gate_up[..., half:]
    torch.testing.assert_close(activate_gated(gate_up, name).double(), gated, atol=1e-5, rtol=1e-5)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_gpt_oss_against_transformers(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    experts = modeling_gpt_oss.GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=1, intermediate_size=32))
    # There, gate and up are in turns.
    in_turns = gate_up.unflatten(1, (2, 32)).transpose(1, 2).flatten(1)
    assert (gate_up.abs() > 7).any()
    out = activate_gated(gate_up, "swiglu_oai")
    assert out.dtype == dtype
    torch.testing.assert_close(out, experts._apply_gate(in_turns))


def test_nothing_is_above_a_soft_cap() -> None:
    x = torch.tensor([-1e4, -30.0, -0.01, 0.0, 3.0, 1e4])
    torch.testing.assert_close(cap_softly(x.clone(), 30.0), 30 * torch.tanh(x / 30))
