"""The decoder of the Llama and Qwen3 families: pre-norm attention and SwiGLU over a residual stream.

Query, key and value are one matrix, so are gate and up. The model has no notion of caches, batches or ranks: it runs
over the tokens of a step in one flat dimension and passes each layer's query, key and value to the attention that it
was called with. To time the operations, pass a stopwatch's `lap`.

Shapes: T tokens, S of them whose logits are wanted, H query heads, K key-value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from eventlm.kernels.int8_linear import BLOCK, dequantize_rows, int8_linear
from eventlm.kernels.pointwise import rms_norm, rotary_embedding, silu_mul
from eventlm.models.config import DecoderConfig
from eventlm.models.rope import RopeTable

Rotation = tuple[Tensor, Tensor]
#: Called with the name of each operation at its end.
Lap = Callable[[str], None]


class Attention(Protocol):
    """Stores the step's keys and values of a layer, then attends."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """The attention of each query over its sequence, [T, H, D]."""


def no_lap(name: str) -> None:
    """Time nothing."""


class Linear(nn.Module):
    """A matrix [out, in], uninitialized until a loader fills it."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = _empty(num_out, num_in)
        self.bias = _empty(num_out) if bias else None

        #: Of each output, if the weight is int8.
        self.scales: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is not None:
            return int8_linear(x, self.weight, self.scales, self.bias)
        return linear(x, self.weight, self.bias)

    def to_int8(self) -> None:
        """Allocate int8 in place of floats."""
        self.weight, self.scales = _empty_int8(self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(size)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


class AttentionLayer(nn.Module):
    """Projections, the norms of Qwen3's heads, and rotation, around an attention that is passed in."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, num_all_heads * config.head_dim, bias=bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention, lap: Lap) -> Tensor:
        heads, num_qk_heads = self._num_heads, self._num_heads + self._num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self._head_dim))
        lap("qkv_proj")
        qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), dim=1)
        qk = rotary_embedding(qk, *rotation)
        lap("rotary")
        out = attention(self._layer, qk[:, :heads], qk[:, heads:], v)
        lap("attention")
        projected: Tensor = self.o_proj(out.flatten(-2))
        lap("o_proj")
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, lap: Lap) -> Tensor:
        inner = silu_mul(self.gate_up_proj(x))
        lap("gate_up_proj")
        out: Tensor = self.down_proj(inner)
        lap("down_proj")
        return out


class DecoderLayer(nn.Module):
    """One layer over the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = AttentionLayer(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention, lap: Lap) -> Tensor:
        normed = self.input_layernorm(x)
        lap("norm")
        x = x + self.self_attn(normed, rotation, attention, lap)
        normed = self.post_attention_layernorm(x)
        lap("norm")
        x = x + self.mlp(normed, lap)
        return x


class Decoder(nn.Module):
    """The whole model, weights uninitialized, in the default dtype and device (see `loader.load_decoder`)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _empty(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else _empty(config.vocab_size, config.hidden_size)
        self.lm_head_scales: nn.Parameter | None = None

    def to_int8(self) -> None:
        """Allocate int8 matrices with their scales in place of floats, before any are loaded.

        An embedding that is not also `lm_head` is only looked up, and stays as it is.
        """
        tied = self.lm_head is self.embed_tokens
        self.lm_head, self.lm_head_scales = _empty_int8(self.lm_head)
        if tied:
            self.embed_tokens = self.lm_head
        for module in self.layers.modules():
            if isinstance(module, Linear):
                module.to_int8()

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        rope: RopeTable,
        attention: Attention,
        lap: Lap = no_lap,
    ) -> Tensor:
        """The residual stream after the last layer, [T, hidden_size]; `positions_T` are in the sequences."""
        rotation = rope.at(positions_T)
        x = self._embed(token_ids_T)
        lap("embed")
        for layer in self.layers:
            x = layer(x, rotation, attention, lap)
        return x

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the matrices by the operation that multiplies by them, over all layers."""
        found = Counter({"lm_head": self.lm_head.nbytes})
        for name, module in self.layers.named_modules():
            if isinstance(module, Linear):
                found[name.rpartition(".")[2]] += module.weight.nbytes
        return dict(found)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        if self.lm_head_scales is None or self.embed_tokens is not self.lm_head:
            return embedding(token_ids_T, self.embed_tokens)
        values, scales = self.lm_head[token_ids_T], self.lm_head_scales[token_ids_T]
        return dequantize_rows(values, scales, self.config.hidden_size).to(self.norm.weight.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [S, V] of the residual stream of S tokens."""
        if self.lm_head_scales is not None:
            return int8_linear(self.norm(x), self.lm_head, self.lm_head_scales, None)
        return linear(self.norm(x), self.lm_head)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _empty_int8(matrix: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
    """Values and scales of a matrix [out, in] of this shape."""
    num_in = -(-matrix.shape[1] // BLOCK) * BLOCK
    values = torch.empty(len(matrix), num_in, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    return nn.Parameter(values, requires_grad=False), nn.Parameter(scales, requires_grad=False)
