from __future__ import annotations

import pytest
import torch

from eventlm.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("shape", [(1, 2), (5, 34), (2, 3, 128)])
def test_gate_comes_first(shape: tuple[int, ...]) -> None:
    gate_up = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = gate_up.clone()
    half = shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    assert torch.allclose(silu_mul(gate_up).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-6)
    assert torch.equal(gate_up, before)
