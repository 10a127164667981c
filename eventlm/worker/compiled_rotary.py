"""The rotary embedding of a model that transformers computes, by a compiled operation, where that computes the same.

Attention modules call a function of their file for it, which has the same name and arguments in most. While the model
runs, another is in its place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.products import Products

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
#: Of the two products that are added: the relative error that two roundings to bfloat16 can cause.
_TOLERANCE = 2**-7

_Rotate = Callable[..., tuple[Tensor, Tensor]]


class CompiledRotary:
    """Within it, files of `model` have the compiled rotation in place of theirs, where both are seen to be the same."""

    def __init__(self, model: nn.Module, products: Products) -> None:
        files = {sys.modules[type(part).__module__] for part in model.modules()}
        #: Of each file its own function, and the one in its place.
        self._functions: list[tuple[ModuleType, _Rotate, _Rotate]] = []
        for file in files:
            original = getattr(file, _NAME, None)
            if original is None or not _has_arguments(original):
                continue
            compiled = _compile(original, products)
            if _is_same(original, compiled):
                self._functions.append((file, original, compiled))

    def __enter__(self) -> None:
        for file, _, own in self._functions:
            setattr(file, _NAME, own)

    def __exit__(self, *error: object) -> None:
        for file, original, _ in self._functions:
            setattr(file, _NAME, original)


def _has_arguments(function: _Rotate) -> bool:
    parameters = inspect.signature(function).parameters
    return list(parameters) == _PARAMETERS and all(
        parameters[name].default is inspect.Parameter.empty for name in _PARAMETERS[:4]
    )


def _compile(original: _Rotate, products: Products) -> _Rotate:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Of [1, heads, T, head size] each, and [1, T, head size]."""
        is_known = (
            unsqueeze_dim == 1
            and q.dtype is k.dtype is cos.dtype is sin.dtype is torch.bfloat16
            and q.dim() == k.dim() == 4
            and cos.dim() == 3
            and cos.shape == sin.shape
            and len(q) == len(k) == len(cos) == 1
            and q.shape[2] == k.shape[2] == cos.shape[1]
            and q.shape[-1] == k.shape[-1] == cos.shape[-1]
            and q.stride(-1) == k.stride(-1) == 1
            and cos.is_contiguous()
            and sin.is_contiguous()
        )
        if not is_known:
            return original(q, k, cos, sin, unsqueeze_dim)
        return products.rotate(q[0], cos, sin)[None], products.rotate(k[0], cos, sin)[None]

    return rotate


@torch.inference_mode()
def _is_same(original: _Rotate, compiled: _Rotate) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((1, 4, 5, 16), (1, 2, 5, 16), (1, 5, 16), (1, 5, 16))
    )
    try:
        expected: Any = original(q, k, cos, sin)
    except Exception:
        # It takes cosines of another shape, for one.
        return False
    if not isinstance(expected, tuple) or len(expected) != 2:
        return False
    for x, ours, theirs in zip((q, k), compiled(q, k, cos, sin), expected, strict=True):
        if not isinstance(theirs, Tensor) or theirs.dtype is not torch.bfloat16 or theirs.shape != x.shape:
            return False
        most = (x * cos).float().abs() + (x.roll(8, dims=-1) * sin).float().abs()
        if not bool(((ours - theirs).float().abs() <= _TOLERANCE * most).all()):
            return False
    return True
