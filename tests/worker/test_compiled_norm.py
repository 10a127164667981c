from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.native import available_builds
from eventlm.kernels.cpu.products import Products
from eventlm.worker.compiled_norm import CompiledNorm, compile_norms

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")


class _Norm(nn.Module):
    """As transformers' models have them."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).uniform_(0.5, 1.5))
        self.eps = 1e-3

    def normed(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()


class PlainNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x).to(x.dtype)


class OffsetNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * (1 + self.weight.float())).to(x.dtype)


class OtherEpsNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 2 * self.eps).rsqrt()).bfloat16()


class MeanNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x - x.mean(-1, keepdim=True)).to(x.dtype)


class GatedNorm(_Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.weight * self.normed(x if gate is None else x * gate).to(x.dtype)


class ExactNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x)


class RaisingNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not without a mask")


class PairNorm(_Norm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * self.normed(x).to(x.dtype), x


class FlatNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normed(x).to(x.dtype)).flatten()


@torch.inference_mode()
def test_norms_that_compute_the_same_are_replaced() -> None:
    kinds = (PlainNorm, OffsetNorm, OtherEpsNorm, MeanNorm, GatedNorm, ExactNorm, RaisingNorm, PairNorm, FlatNorm)
    model = nn.Sequential(*(kind() for kind in kinds), PlainNorm(24), nn.LayerNorm(32)).bfloat16()
    x = torch.randn(3, 5, 32).bfloat16()
    expected = [part(x) for part in model[:2]]
    compile_norms(model, Products(available_builds()[0], [(1, 1)], num_threads=1))
    assert [type(part) is CompiledNorm for part in model] == [True] * 2 + [False] * 9
    for part, theirs in zip(model[:2], expected, strict=True):
        assert torch.allclose(part(x).float(), theirs.float(), rtol=2**-6)
        assert torch.equal(part.forward(x), part(x))
        assert part.eps == 1e-3
    # The weight stays, once, and so does what it gives of other dtypes.
    assert model[0].weight.shape == (32,)
    assert len(list(model[0].parameters())) == 1
    assert model[0](x.float()).dtype is torch.float32
