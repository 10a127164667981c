"""Mistral, Ministral, Ministral 3 and Mixtral."""

from __future__ import annotations

from typing import Any, ClassVar

from eventlm.models.families.fields import (
    ConfigError,
    Fields,
    HeadSize,
    NumExperts,
    NumHeads,
    Positive,
    PositiveFloat,
    attention,
    experts,
    feed_forward,
    model,
    rope_fields,
    stacked,
    windows,
)
from eventlm.models.spec import ExpertsSpec, ModelSpec, TensorNames

_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


class MistralFields(Fields, frozen=True, kw_only=True):
    """The window is that of all layers, unless `layer_types` says otherwise."""

    num_key_value_heads: NumHeads | None = 8
    sliding_window: Positive | None = 4096


def mistral(fields: MistralFields) -> ModelSpec:
    """Llama with a window in all layers or in some."""
    return _mistral(fields)


class Ministral3Fields(MistralFields, frozen=True, kw_only=True):
    """No window by default."""

    head_dim: HeadSize | None = 128
    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: Positive | None = None


def ministral3(fields: Ministral3Fields) -> ModelSpec:
    """Mistral with queries that grow with their position."""
    beta = rope_fields(fields).llama_4_scaling_beta
    if beta is None:
        raise ConfigError("rope_parameters needs llama_4_scaling_beta")
    return _mistral(fields, query_scaling_beta=beta)


class MixtralFields(MistralFields, frozen=True, kw_only=True):
    """No window by default."""

    THETA: ClassVar[float] = 1_000_000.0
    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: Positive | None = None
    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2


def mixtral(fields: MixtralFields) -> ModelSpec:
    """Mistral with experts, whose shares are the softmax of the chosen ones."""
    part = experts(feed_forward(fields, has_bias=False), fields.num_local_experts, fields.num_experts_per_tok)
    return _mistral(fields, part, names=_MIXTRAL_NAMES, other_names=stacked(TensorNames()))


def _mistral(
    fields: MistralFields, part: ExpertsSpec | None = None, *, query_scaling_beta: float = 0.0, **changes: Any
) -> ModelSpec:
    spans = windows(fields, lambda layer: fields.sliding_window is not None)
    scaled = {"query_scaling_beta": query_scaling_beta, "has_qkv_bias": False, "has_output_bias": False}
    return model(fields, [attention(fields, window=window, **scaled) for window in spans], part, **changes)
