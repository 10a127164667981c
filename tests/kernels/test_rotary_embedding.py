from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eventlm.kernels.rotary_embedding import rotary_embedding


def test_against_transformers() -> None:
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
