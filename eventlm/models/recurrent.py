"""Layers that keep a state of each sequence, in torch: short convolutions and the gated delta rule.

Tokens come one after the other, so that a sequence's numbers do not depend on how its prompt was cut into chunks.
Everything is float32.

Shapes: T tokens, C channels, N taps, G key heads, H value heads, K key_dim, V value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from eventlm.kernels.sequence_states import StepStates
from eventlm.models.spec import ConvolutionSpec, DeltaSpec, RecurrentSpec

#: Added to the square of the length of a query or key.
_LENGTH_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """What the delta rule has beside `taps`: `delta_scale` [V], for each token and head decays and betas."""

    scale_V: Tensor
    decays_TH: Tensor
    betas_TH: Tensor


def convolve_gated(
    spec: ConvolutionSpec, mixed: Tensor, taps_CN: Tensor, bias_C: Tensor | None, states: StepStates, first: int
) -> Tensor:
    """C * convolution(B * x) of the rows' tokens, [T, C]. mixed: B, C and x, [T, 3 C]. first: see `Convolve.state`."""
    before_TC, after_TC, x_TC = mixed.float().chunk(3, dim=-1)
    inputs_TC = before_TC * x_TC

    def convolve_some(tokens: slice, state: Tensor) -> Tensor:
        return after_TC[tokens] * _convolve(inputs_TC[tokens], taps_CN, bias_C, _last_inputs(spec, state))

    return _by_rows(spec, states, first, convolve_some)


def gated_delta(
    spec: DeltaSpec, mixed: Tensor, taps_CN: Tensor, weights: DeltaWeights, states: StepStates, first: int, eps: float
) -> Tensor:
    """What the heads give, normed and multiplied by `delta_scale` but not by their gates, [T, H * V].

    mixed: queries, keys and values before the convolution, [T, C]. first: see `Delta.state`. eps: of the norm.
    """
    inputs_TC = mixed.float()

    def compute_some(tokens: slice, state: Tensor) -> Tensor:
        convolved_TC = silu(_convolve(inputs_TC[tokens], taps_CN, None, _last_inputs(spec, state)))
        sizes = (spec.keys_size, spec.keys_size, spec.values_size)
        q_TGK, k_TGK, v_THV = (
            part.unflatten(-1, (-1, size))
            for part, size in zip(
                convolved_TC.split(sizes, -1), (spec.key_dim, spec.key_dim, spec.value_dim), strict=True
            )
        )
        group = spec.num_value_heads // spec.num_key_heads
        # The key head of each value head.
        numbers_H = torch.arange(spec.num_value_heads)
        numbers_H = numbers_H % spec.num_key_heads if spec.is_interleaved else numbers_H // group
        q_THK = (_of_length_1(q_TGK) * spec.key_dim**-0.5)[:, numbers_H]
        k_THK = _of_length_1(k_TGK)[:, numbers_H]
        matrix_HKV = state[-spec.values_size * spec.key_dim :].view(spec.num_value_heads, spec.key_dim, spec.value_dim)
        decays_TH, betas_TH = weights.decays_TH[tokens], weights.betas_TH[tokens]
        out_THV = torch.empty_like(v_THV)
        for token in range(len(v_THV)):
            matrix_HKV *= decays_TH[token, :, None, None]
            k_HK1 = k_THK[token, :, :, None]
            found_HV = (k_HK1 * matrix_HKV).sum(1)
            change_HV = betas_TH[token, :, None] * (v_THV[token] - found_HV)
            matrix_HKV += k_HK1 * change_HV[:, None]
            out_THV[token] = (q_THK[token, :, :, None] * matrix_HKV).sum(1)
        scale = torch.rsqrt(out_THV.square().mean(-1, keepdim=True) + eps)
        return (out_THV * scale * weights.scale_V).flatten(1)

    return _by_rows(spec, states, first, compute_some)


def decays_of(products_TH: Tensor, rate_H: Tensor, bias_H: Tensor) -> Tensor:
    """What each head's matrix is multiplied by, for products with `delta_decay`."""
    return torch.exp(-rate_H.exp() * softplus(products_TH + bias_H))


def _by_rows(spec: RecurrentSpec, states: StepStates, first: int, compute: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """compute(tokens, state) of all tokens, one row after the other, each in pieces that end where the state is copied.

    It changes the state in place.
    """
    return torch.cat([compute(*piece) for piece in states.pieces(slice(first, first + spec.state_size))])


def _last_inputs(spec: RecurrentSpec, state: Tensor) -> Tensor:
    """Those that the convolution has seen last, [N - 1, C]."""
    return state[: (spec.num_taps - 1) * spec.num_channels].view(-1, spec.num_channels)


def _convolve(inputs_TC: Tensor, taps_CN: Tensor, bias_C: Tensor | None, last: Tensor) -> Tensor:
    """Sums over the last N inputs of each channel, [T, C]. last: what came before the first, replaced by the last."""
    inputs = torch.cat((last, inputs_TC))
    last.copy_(inputs[len(inputs_TC) :])
    out_TC = (inputs.unfold(0, taps_CN.shape[1], 1) * taps_CN).sum(-1)
    return out_TC if bias_C is None else out_TC + bias_C


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)
