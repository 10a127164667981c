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


class Siblings(nn.Module):
    """Layers of which some have the same input, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        names = ("query", "key", "value", "output", "changed", "again")
        self.layers = nn.ModuleDict({name: nn.Linear(32, 32, dtype=torch.bfloat16) for name in names})

    def forward(self, x: Tensor, is_short: bool = False) -> Tensor:
        layers = self.layers
        q, k = layers["query"](x), layers["key"](x)
        x = q * torch.tanh(k) if is_short else q * torch.tanh(k) + layers["value"](x)
        x = x + layers["output"](x)
        # The same tensor with other values, and a layer called twice.
        x += 1
        x = layers["changed"](x) + layers["again"](x)
        return x + layers["again"](x)


@torch.inference_mode()
def test_layers_with_the_same_input_are_multiplied_together() -> None:
    model = Siblings()
    inputs = [torch.randn(count, 32).bfloat16() for count in (5, 1, 3)]
    short = [False, True, False]
    expected = [model(*each) for each in zip(inputs, short, strict=True)]
    pack_linears(model, lambda: model(inputs[0]), available_builds()[0], 1)
    shared = {name: layer._shared for name, layer in model.layers.items()}
    assert shared["query"] is shared["key"] is shared["value"]
    assert len(set(map(id, shared.values()))) == 4
    for x, is_short, out in zip(inputs, short, expected, strict=True):
        assert torch.allclose(model(x, is_short).float(), out.float(), atol=0.03 * float(out.abs().max()))


@torch.inference_mode()
def test_nothing_to_replace() -> None:
    model = nn.Linear(4, 4)
    assert pack_linears(model, lambda: model(torch.zeros(1, 4)), available_builds()[0], 1) is None
