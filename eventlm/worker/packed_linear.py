"""The linear layers of a model that transformers computes, multiplied by the compiled products."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.products import MatrixGroup, Products


class _SharedInput:
    """The products of layers that are called with the same input, one after the other: the first computes all."""

    def __init__(self, linears: list[nn.Linear], products: Products) -> None:
        self._products = products
        self._group = MatrixGroup([products.pack(each.weight, each.bias) for each in linears])
        self._last = len(linears) - 1
        self._input: Tensor | None = None
        #: Those that have not been taken.
        self._outputs: dict[int, Tensor] = {}

    def take(self, place: int, x: Tensor) -> Tensor:
        if self._last == 0:
            return self._products.multiply(self._group, x)[0]
        if self._input is not x or place not in self._outputs:
            self._outputs = dict(enumerate(self._products.multiply(self._group, x)))
            self._input = x
        output = self._outputs.pop(place)
        if place == self._last:
            # What comes next may be other values in the same tensor.
            self._input, self._outputs = None, {}
        return output


class PackedLinear(nn.Module):
    """In the place of an `nn.Linear` in bfloat16."""

    def __init__(self, linear: nn.Linear, shared: _SharedInput, place: int) -> None:
        super().__init__()
        self._shared, self._place = shared, place
        #: What models ask of it: dtype and shape. It has no values.
        self.weight = linear.weight.detach().to("meta")

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]. Without hooks: a step makes hundreds of calls."""
        return self._shared.take(self._place, x)

    forward = __call__


class _Call(NamedTuple):
    name: str
    linear: nn.Linear
    input: Tensor
    #: At the time of the call.
    values: Tensor


def pack_linears(model: nn.Module, run: Callable[[], object], build: str, num_threads: int) -> Products | None:
    """Replace the layers of `model` that are called in `run`. None if there are none.

    Those that are only called later, or asked for their weights, stay torch's. Raises MemoryError.
    """
    calls: list[_Call] = []

    def note(name: str, linear: nn.Linear, inputs: tuple[Any, ...]) -> None:
        x = inputs[0]
        if x.dtype == linear.weight.dtype == torch.bfloat16:
            calls.append(_Call(name, linear, x, x.clone()))

    hooks = [
        part.register_forward_pre_hook(lambda part, inputs, name=name: note(name, part, inputs))
        for name, part in model.named_modules()
        # Of others it is not known what they compute.
        if type(part) is nn.Linear
    ]
    run()
    for hook in hooks:
        hook.remove()
    if not calls:
        return None
    groups = _groups(calls)
    calls.clear()
    shapes = [(linear.out_features, linear.in_features) for group in groups for linear in group.values()]
    products = Products(build, shapes, num_threads=num_threads)
    # One after the other leaves, as it is packed.
    groups.reverse()
    while groups:
        group = groups.pop()
        shared = _SharedInput(list(group.values()), products)
        for place, (name, linear) in enumerate(group.items()):
            model.set_submodule(name, PackedLinear(linear, shared, place))
    return products


def _groups(calls: list[_Call]) -> list[dict[str, nn.Linear]]:
    """Layers by name, those together that are called with the same input one after the other."""
    groups = [{calls[0].name: calls[0].linear}]
    seen = {calls[0].name}
    for before, call in pairwise(calls):
        is_same = before.input is call.input and torch.equal(before.values, call.values)
        if call.name in seen:
            # Called more than once, perhaps after others than before.
            groups = [group for group in groups if call.name not in group] + [
                {name: linear} for group in groups if call.name in group for name, linear in group.items()
            ]
        elif is_same and before.name in groups[-1]:
            groups[-1][call.name] = call.linear
        else:
            groups.append({call.name: call.linear})
        seen.add(call.name)
    return groups
