from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.native import available_builds
from eventlm.worker.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")


class Model(nn.Module):
    """Calls one layer, reads another's weight, and has two that compute in float32 or something else."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(32, 48, dtype=torch.bfloat16)
        self.read = nn.Linear(48, 16, bias=False, dtype=torch.bfloat16)
        self.exact = nn.Linear(16, 16)
        self.special = Special(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(self.called(x), self.read.weight)
        return self.special(self.exact(x.float()).to(self.special.weight.dtype))


class Special(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@torch.inference_mode()
def test_layers_that_are_called_are_replaced() -> None:
    model, x = Model(), torch.randn(5, 32).bfloat16()
    expected = model(x)
    pack_linears(model, lambda: model(x), available_builds()[0], 1)
    kinds = {name: type(part) for name, part in model.named_children()}
    assert kinds == {"called": PackedLinear, "read": nn.Linear, "exact": nn.Linear, "special": Special}
    assert (model.called.weight.dtype, model.called.weight.shape) == (torch.bfloat16, (48, 32))
    assert torch.allclose(model(x).float(), expected.float(), atol=0.02 * float(expected.abs().max()))


@torch.inference_mode()
def test_nothing_to_replace() -> None:
    model = nn.Linear(4, 4)
    assert pack_linears(model, lambda: model(torch.zeros(1, 4)), available_builds()[0], 1) is None
