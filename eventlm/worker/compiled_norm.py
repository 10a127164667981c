"""The norms of a model that transformers computes, by a compiled operation, where that computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.products import Products

#: Of a norm's elements; what the compiled one's are a multiple of.
_LANES = 16
#: What norms in transformers call what is added to the mean.
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
#: Of each value: the relative error that two roundings to bfloat16 can cause.
_TOLERANCE = 2**-7


class CompiledNorm(nn.Module):
    """In the place of an RMS norm, `norm`, whose weight is `weight_D`, float32."""

    def __init__(self, norm: nn.Module, products: Products, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = norm.weight
        # What models may ask of it.
        for name in _EPS_NAMES:
            if hasattr(norm, name):
                setattr(self, name, getattr(norm, name))
        # Not its part: its weights would be there twice.
        self._norm, self._products, self._weight_D, self._eps = (norm,), products, weight_D, eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D]. Without hooks, as `PackedLinear`."""
        if x.dtype is not torch.bfloat16:
            output: Tensor = self._norm[0](x)
            return output
        return self._products.norm(x, self._weight_D, self._eps)

    forward = __call__


@torch.inference_mode()
def compile_norms(model: nn.Module, products: Products) -> None:
    """Replace the norms of `model` that are seen to give what the compiled one does."""
    for name, part in list(model.named_modules()):
        if _may_be_norm(part) and (compiled := _compile(part, products)) is not None:
            model.set_submodule(name, compiled)


def _may_be_norm(part: nn.Module) -> bool:
    parameters = dict(part.named_parameters())
    return (
        type(part).__name__.endswith("Norm")
        and list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and len(parameters["weight"]) % _LANES == 0
        and not any(True for _ in part.children())
        and not any(True for _ in part.buffers())
        and len(inspect.signature(part.forward).parameters) == 1
    )


def _compile(norm: nn.Module, products: Products) -> CompiledNorm | None:
    """None if it computes something else."""
    weight_D = norm.get_parameter("weight").detach().float()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn((6, len(weight_D)), generator=generator)
    for eps in _epsilons(norm):
        # Rows of which the mean is lost beside eps, of its size, and far above it.
        sizes = torch.tensor([0.1, 1.0, 3.0, 10.0, 1e3, 1e6]) * eps**0.5
        x = (numbers * sizes[:, None]).bfloat16()
        try:
            expected = norm(x)
        except Exception:
            # It may need something of the model that is not there now.
            return None
        if not isinstance(expected, Tensor) or expected.dtype is not torch.bfloat16 or expected.shape != x.shape:
            return None
        for offset in (0.0, 1.0):
            compiled = CompiledNorm(norm, products, weight_D + offset, eps)
            if torch.allclose(compiled(x).float(), expected.float(), rtol=_TOLERANCE, atol=1e-30):
                return compiled
    return None


def _epsilons(norm: nn.Module) -> Iterator[float]:
    for name in _EPS_NAMES:
        eps = getattr(norm, name, None)
        if isinstance(eps, float) and eps > 0:
            yield eps
