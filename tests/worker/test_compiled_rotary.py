from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eventlm.kernels.cpu.native import available_builds
from eventlm.kernels.cpu.products import Products
from eventlm.worker.compiled_rotary import CompiledRotary

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")

_Turn = Callable[[Tensor], Tensor]


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def neighbors(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotary(turn: _Turn) -> Callable[..., tuple[Tensor, Tensor]]:
    """As in transformers' files."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    return apply_rotary_pos_emb


def model_of(function: object, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, ModuleType]:
    """A model, and its file, which has this function."""
    file = ModuleType("rotary_file")
    file.apply_rotary_pos_emb = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    return type("Attention", (nn.Module,), {"__module__": file.__name__})(), file


def products() -> Products:
    return Products(available_builds()[0], [(1, 1)], num_threads=1)


@torch.inference_mode()
def test_a_rotation_of_halves_is_replaced_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rotary(halves)
    model, file = model_of(original, monkeypatch)
    compiled = CompiledRotary(model, products())
    assert file.apply_rotary_pos_emb is original
    generator = torch.Generator().manual_seed(3)
    q, k, angles = (torch.randn(shape, generator=generator) for shape in ((1, 4, 7, 32), (1, 2, 7, 32), (1, 7, 32)))
    given = [x.bfloat16() for x in (q, k, angles.cos(), angles.sin())]
    with compiled:
        assert file.apply_rotary_pos_emb is not original
        ours = file.apply_rotary_pos_emb(*given)
        # Others than it knows are the model's own function's.
        by_token = [x.transpose(1, 2) for x in given[:2]]
        others = file.apply_rotary_pos_emb(*by_token, *given[2:], unsqueeze_dim=2)
        # Of one token, the same for all.
        wide = file.apply_rotary_pos_emb(*given[:2], *(x[:, :1] for x in given[2:]))
        exact = file.apply_rotary_pos_emb(*(x.float() for x in given))
    assert file.apply_rotary_pos_emb is original
    expected_wide = original(*given[:2], *(x[:, :1] for x in given[2:]))
    for number in range(2):
        assert torch.equal(wide[number], expected_wide[number])
        assert ours[number].dtype is torch.bfloat16
        assert torch.allclose(ours[number].float(), exact[number], rtol=2**-8, atol=1e-5)
        assert torch.equal(others[number].transpose(1, 2), original(*given)[number])


def of_half_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q[..., :8] * cos, k[..., :8] * sin


def raising(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    raise ValueError("not without positions")


def of_queries(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return rotary(halves)(q, k, cos, sin)[0]


def of_optional_keys(
    q: Tensor, k: Tensor | None = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return rotary(halves)(q, k, cos, sin)


@pytest.mark.parametrize(
    "function",
    [
        rotary(neighbors),
        rotary(lambda x: -halves(x)),
        of_half_angles,
        raising,
        of_queries,
        of_optional_keys,
        lambda x, cos, sin: x,
        None,
    ],
)
def test_what_is_something_else_stays(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = model_of(function, monkeypatch)
    with CompiledRotary(model, products()):
        assert file.apply_rotary_pos_emb is function
