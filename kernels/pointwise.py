"""Operations of a decoder layer on each token alone, in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
#: Of `swiglu_oai`, the only activation that also changes what it is multiplied by.
_SWIGLU_ALPHA, _SWIGLU_LIMIT = 1.702, 7.0


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root mean square layer norm (Zhang and Sennrich, 2019).

    That is `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the mean is taken in float32. x: [..., N],
    weight: [N] of the same dtype, None: ones; returns [..., N].
    """
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al., 2016): `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, like `rms_norm`."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def rotary_embedding(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, is_interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of the first R elements of each head; the others stay.

    x_THD: [tokens, heads, head_dim]. Element i is rotated with i + R / 2, the layout of most checkpoints, or if
    `is_interleaved` 2i with 2i + 1. cos_T1R, sin_T1R: [tokens, 1, R], alike for both elements of a pair, except that
    the sine is negative for the first. Returns a new tensor like x_THD.
    """
    num_rotated = cos_T1R.shape[-1]
    x, rest = x_THD[..., :num_rotated], x_THD[..., num_rotated:]
    if is_interleaved:
        partners = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        partners = torch.cat((second, first), dim=-1)
    rotated = torch.addcmul(x * cos_T1R, partners, sin_T1R)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def activate(x: Tensor, activation: str) -> Tensor:
    """`activation`, as `eventlm.models.spec` names them, of each element."""
    return _ACTIVATIONS[activation](x)


def activate_gated(gate_up: Tensor, activation: str) -> Tensor:
    """A gate (Shazeer, 2020): `activation(gate) * up` [..., N] of `gate_up` [..., 2 * N], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
        return (gate * torch.sigmoid(gate * _SWIGLU_ALPHA)).mul_(up + 1)
    return activate(gate, activation).mul_(up)


def cap_softly(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, in place: nothing becomes larger than `cap`."""
    return x.div_(cap).tanh_().mul_(cap)
