"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from eventlm.models.families.fields import (
    SLIDING,
    ConfigError,
    Fields,
    HeadSize,
    NotNegative,
    NumExperts,
    NumHeads,
    Positive,
    Size,
    attention,
    experts,
    feed_forward,
    model,
    stacked,
    windows,
)
from eventlm.models.spec import AttentionSpec, ModelSpec, TensorNames

_MOE_NAMES = TensorNames(
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
)


class Qwen2Fields(Fields, frozen=True, kw_only=True):
    """The window is that of the layers from `max_window_layers` on, if there are windows."""

    num_key_value_heads: NumHeads | None = 32
    use_sliding_window: bool = False
    sliding_window: Positive | None = 4096
    max_window_layers: int = 28


def qwen2(fields: Qwen2Fields) -> ModelSpec:
    """Llama with biases of queries, keys and values."""
    return _dense(fields, has_qkv_bias=True, has_output_bias=False)


class Qwen3Fields(Qwen2Fields, frozen=True, kw_only=True):
    """Heads have a size of their own."""

    head_dim: HeadSize | None = 128


def qwen3(fields: Qwen3Fields) -> ModelSpec:
    """Llama with a norm of each head's query and key."""
    return _dense(fields, qk_norm="head")


class QwenMoeFields(Qwen2Fields, frozen=True, kw_only=True):
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`. A window of 0 is none."""

    sliding_window: NotNegative | None = 4096
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool = False


class Qwen2MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    """The window, if there is one, is that of every other layer before `max_window_layers`."""

    num_key_value_heads: NumHeads | None = 16
    qkv_bias: bool = True
    num_experts: NumExperts = 60
    num_experts_per_tok: NumExperts = 4
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: Size = 5632


def qwen2_moe(fields: Qwen2MoeFields) -> ModelSpec:
    """Qwen 2 with experts, and a shared one behind a gate."""
    attentions = [
        attention(fields, window=window, has_qkv_bias=fields.qkv_bias, has_output_bias=False)
        for window in _windows(fields, lambda layer: layer % 2 == 0 and layer < fields.max_window_layers)
    ]
    shared = feed_forward(fields, size=fields.shared_expert_intermediate_size, has_bias=False)
    counts = fields.num_experts, fields.num_experts_per_tok
    return _sparse(fields, attentions, fields.moe_intermediate_size, *counts, shared=shared, has_shared_gate=True)


class Qwen3MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    """The window, if there is one, is that of all layers. `num_local_experts` is a later name of `num_experts`."""

    num_key_value_heads: NumHeads | None = 4
    num_experts: NumExperts = 128
    num_local_experts: NumExperts | None = None
    num_experts_per_tok: NumExperts = 8
    moe_intermediate_size: Size = 768


def qwen3_moe(fields: Qwen3MoeFields) -> ModelSpec:
    """Qwen 3 with experts."""
    attentions = [attention(fields, window=window, qk_norm="head") for window in _windows(fields, lambda layer: True)]
    counts = fields.num_local_experts or fields.num_experts, fields.num_experts_per_tok
    return _sparse(fields, attentions, fields.moe_intermediate_size, *counts)


def _dense(fields: Qwen2Fields, **changes: Any) -> ModelSpec:
    spans = _windows(fields, lambda layer: layer >= fields.max_window_layers)
    return model(fields, [attention(fields, window=window, **changes) for window in spans])


def _sparse(
    fields: QwenMoeFields, attentions: list[AttentionSpec], size: int, num_experts: int, num_active: int, **changes: Any
) -> ModelSpec:
    dense = feed_forward(fields, has_bias=False)
    expert = feed_forward(fields, size=size, has_bias=False)
    mixture = experts(expert, num_experts, num_active, is_normalized=fields.norm_topk_prob, **changes)
    dense_layers = set(fields.mlp_only_layers or ())
    parts = [
        dense if layer in dense_layers or (layer + 1) % fields.decoder_sparse_step else mixture
        for layer in range(fields.num_hidden_layers)
    ]
    return model(fields, attentions, parts, names=_MOE_NAMES, other_names=stacked(_MOE_NAMES))


def _windows(fields: Qwen2Fields, default: Callable[[int], bool]) -> list[int]:
    """The window of each layer: if there are any, `default` says which layers have one."""
    if SLIDING in (fields.layer_types or ()) and not fields.use_sliding_window:
        raise ConfigError(f"layer_types has {SLIDING}, and use_sliding_window is false; change one of them")
    has_windows = fields.use_sliding_window and bool(fields.sliding_window)
    if not has_windows:
        fields = msgspec.structs.replace(fields, sliding_window=None)
    return windows(fields, lambda layer: has_windows and default(layer))
