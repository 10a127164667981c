"""The decoder's forward pass on a GPU: its matrices multiplied by the vendor's library, all else by Triton kernels.

A layer reads and writes the residual stream once, where it is normed. Query and key are normed and rotated in place,
and stored in the cache with the value in the same pass.

Shapes: T tokens, S of them whose logits are wanted, H query heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eventlm.kernels.gpu.embed_tokens import embed_tokens
from eventlm.kernels.gpu.gates import silu_mul
from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.kernels.gpu.qkv_store import qkv_store
from eventlm.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from eventlm.kernels.pointwise import activate_gated
from eventlm.kernels.pointwise import rms_norm as torch_rms_norm
from eventlm.models.decoder import Lap, no_lap
from eventlm.models.gpu_weights import GpuWeights, multiply
from eventlm.models.program import WeightKey
from eventlm.models.rope import angles


class StepTokens(NamedTuple):
    """The tokens of a step on the device.

    staged_T: int32 ids; -1 - n is the last token of slot n, which the host may not have yet. positions_T: int32, in
    the sequences. cache_slots_T: int64, where keys and values go; -1 for a token that only pads the batch.
    residual_TH: what the residual stream begins with, of a part of a model that has no embedding.
    """

    staged_T: Tensor
    positions_T: Tensor
    cache_slots_T: Tensor
    residual_TH: Tensor | None = None


class LayerCache(Protocol):
    """Where keys and values go."""

    def layer(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Elements and scales of one layer."""
        ...


#: As `layer_tail`.
CompiledTail = Callable[["TailWeights", Tensor, Tensor, float], tuple[Tensor, Tensor]]
#: The attention of a layer's queries [T, H, D], with the scores of its sinks [H] if it has any, the step's keys and
#: values being in the cache; returns [T, H, D].
Attend = Callable[[int, Tensor, Tensor | None], Tensor]


class GpuDecoder:
    """Runs models like Llama and Qwen3 (see `spec.why_not_plain`) on a device.

    `is_compiled`: torch compiles what follows a layer's attention, in place of hand-written kernels.
    """

    def __init__(self, decoder: GpuWeights, *, max_positions: int, is_compiled: bool = False) -> None:
        model, weights = decoder.model, decoder.weights
        self._decoder = decoder
        self._eps = model.norm.eps
        self._num_heads, self._head_dim = model.num_heads, model.head_dim
        self._multiply = decoder.product
        self._embedding, self._lm_head = decoder.embedding, decoder.matrix("lm_head", 0)
        self._first_norm, self._last_norm = (
            weights[WeightKey(name, 0, "weight")] for name in ("attention_norm", "final_norm")
        )

        def both(name: str, layer: int) -> tuple[Tensor | PackedWeight, Tensor | None]:
            return decoder.matrix(name, layer), decoder.bias(name, layer)

        self._layers = []
        for layer in range(model.num_layers):
            norms = (weights.get(WeightKey(name, layer, "weight")) for name in ("query_norm", "key_norm"))
            tail = TailWeights(
                *both("output", layer),
                weights[WeightKey("feed_forward_norm", layer, "weight")],
                *both("gate_up", layer),
                *both("down", layer),
                weights.get(WeightKey("attention_norm", layer + 1, "weight")),
            )
            self._layers.append((AttentionWeights(*both("qkv", layer), *norms), tail))
        #: None: hand-written kernels.
        self.compiled: CompiledTail | None = torch.compile(layer_tail, dynamic=True) if is_compiled else None
        # Rounded as transformers rounds them.
        weight = self._last_norm
        self._cos, self._sin = angles(model.ropes[0], max_positions, dtype=weight.dtype, device=weight.device)

    def forward(
        self, tokens: StepTokens, last_tokens: Tensor, cache: LayerCache, attend: Attend, lap: Lap = no_lap
    ) -> Tensor:
        """The residual stream after the last layer, [T, hidden_size]. Stores keys and values of all tokens."""
        residual = self._embedding.new_empty(len(tokens.staged_T), self._embedding.shape[1])
        embed_tokens(tokens.staged_T, last_tokens, self._embedding, residual)
        lap("embed")
        x = rms_norm(residual, self._first_norm, self._eps)
        lap("norm")
        for number, (attention, tail) in enumerate(self._layers):
            out = self._attention(attention, number, x, tokens, cache, attend, lap)
            if self.compiled is not None:
                x, residual = self.compiled(tail, out, residual, self._eps)
                lap("compiled")
            else:
                x = self._tail(tail, out, residual, lap)
        return residual

    def _attention(
        self,
        weights: AttentionWeights,
        number: int,
        x: Tensor,
        tokens: StepTokens,
        cache: LayerCache,
        attend: Attend,
        lap: Lap,
    ) -> Tensor:
        """The attention of all heads, [T, H * D]."""
        qkv = self._multiply(x, weights.qkv_proj, weights.qkv_bias)
        lap("qkv_proj")
        kv, scales = cache.layer(number)
        qkv_store(
            qkv,
            tokens.positions_T,
            tokens.cache_slots_T,
            self._cos,
            self._sin,
            weights.q_norm,
            weights.k_norm,
            self._eps,
            kv,
            scales,
            self._num_heads,
        )
        lap("rotary")
        q_THD = qkv[:, : self._num_heads * self._head_dim].unflatten(1, (self._num_heads, self._head_dim))
        out = attend(number, q_THD, None).flatten(1)
        lap("attention")
        return out

    def _tail(self, weights: TailWeights, out: Tensor, residual: Tensor, lap: Lap) -> Tensor:
        """What follows a layer's attention: the next layer's normed input, and the residual stream in its place."""
        x = self._multiply(out, weights.o_proj, weights.o_bias)
        lap("o_proj")
        add_rms_norm(x, residual, weights.norm, self._eps)
        lap("norm")
        inner = silu_mul(self._multiply(x, weights.gate_up_proj, weights.gate_up_bias))
        lap("gate_up_proj")
        x = self._multiply(inner, weights.down_proj, weights.down_bias)
        lap("down_proj")
        if weights.next_norm is None:
            residual.add_(x)
        else:
            add_rms_norm(x, residual, weights.next_norm, self._eps)
        lap("norm")
        return x

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of the residual stream, [S, hidden_size]."""
        return rms_norm(hidden_SH, self._last_norm, self._eps)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] of the residual stream of S tokens."""
        return self._multiply(self.norm(hidden_SH), self._lm_head, None)

    def weight_bytes(self) -> dict[str, int]:
        """See `Decoder.weight_bytes`."""
        return self._decoder.weight_bytes()


class AttentionWeights(NamedTuple):
    """Weights of the part of a layer before its attention."""

    qkv_proj: Tensor | PackedWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


class TailWeights(NamedTuple):
    """Weights of the part of a layer after its attention; only tensors, so that all layers compile to one function."""

    o_proj: Tensor | PackedWeight
    o_bias: Tensor | None
    norm: Tensor
    gate_up_proj: Tensor | PackedWeight
    gate_up_bias: Tensor | None
    down_proj: Tensor | PackedWeight
    down_bias: Tensor | None
    next_norm: Tensor | None


def layer_tail(weights: TailWeights, out: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What follows a layer's attention, in torch's operations: the next layer's normed input, the residual stream."""
    residual = residual + multiply(out, weights.o_proj, weights.o_bias)
    x = torch_rms_norm(residual, weights.norm, eps)
    inner = activate_gated(multiply(x, weights.gate_up_proj, weights.gate_up_bias), "silu")
    residual = residual + multiply(inner, weights.down_proj, weights.down_bias)
    return (residual if weights.next_norm is None else torch_rms_norm(residual, weights.next_norm, eps)), residual
