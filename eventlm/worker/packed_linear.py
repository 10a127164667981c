"""The linear layers of a model that transformers computes, multiplied by the compiled products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.products import Products


class PackedLinear(nn.Module):
    """In the place of an `nn.Linear` in bfloat16."""

    def __init__(self, linear: nn.Linear, products: Products) -> None:
        super().__init__()
        self._products = products
        self._matrix = products.pack(linear.weight, linear.bias)
        #: What models ask of it: dtype and shape. It has no values.
        self.weight = linear.weight.detach().to("meta")

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._products.multiply(self._matrix, x)


def pack_linears(model: nn.Module, run: Callable[[], object], build: str, num_threads: int) -> Products | None:
    """Replace the layers of `model` that are called in `run`. None if there are none.

    Others may only be asked for their weights, which are left as they are. Raises MemoryError.
    """
    called: dict[str, nn.Linear] = {}

    def note(name: str, linear: nn.Linear, inputs: tuple[Any, ...]) -> None:
        if inputs[0].dtype == linear.weight.dtype == torch.bfloat16:
            called[name] = linear

    hooks = [
        part.register_forward_pre_hook(lambda part, inputs, name=name: note(name, part, inputs))
        for name, part in model.named_modules()
        # Of others it is not known what they compute.
        if type(part) is nn.Linear
    ]
    run()
    for hook in hooks:
        hook.remove()
    if not called:
        return None
    products = Products(build, most_inputs=max(each.in_features for each in called.values()), num_threads=num_threads)
    # One after the other leaves, as it is packed.
    while called:
        name, linear = called.popitem()
        model.set_submodule(name, PackedLinear(linear, products))
    return products
