"""gpt-oss. The experts of its published checkpoints are quantized (MXFP4)."""

from __future__ import annotations

from typing import ClassVar

from eventlm.models.families.fields import (
    ConfigError,
    Fields,
    HeadSize,
    NumExperts,
    NumHeads,
    Positive,
    PositiveFloat,
    RopeFields,
    attention,
    experts,
    model,
    rope,
    windows,
)
from eventlm.models.spec import FeedForwardSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    router="mlp.router",
    expert_gate_up="mlp.experts.gate_up_proj",
    expert_down="mlp.experts.down_proj",
    stacking="columns",
)
#: Where config.json does not say how positions are rotated.
_ROPE = RopeFields(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)


class GptOssFields(Fields, frozen=True, kw_only=True):
    """Every other layer has a window, the first one too."""

    THETA: ClassVar[float] = 150_000.0
    num_key_value_heads: NumHeads | None = 8
    head_dim: HeadSize | None = 64
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = True
    sliding_window: Positive | None = 128
    num_local_experts: NumExperts = 128
    num_experts_per_tok: NumExperts = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def gpt_oss(fields: GptOssFields) -> ModelSpec:
    """Experts with a clamped SwiGLU, biases, sinks, and windows in every other layer."""
    if (fields.swiglu_alpha, fields.swiglu_limit) != (1.702, 7.0):
        raise ConfigError(f"swiglu_alpha {fields.swiglu_alpha}, swiglu_limit {fields.swiglu_limit} is not supported")
    rope_spec = rope(fields, None if fields.rope_scaling or fields.rope_parameters else _ROPE)
    expert = FeedForwardSpec(size=fields.intermediate_size, activation="swiglu_oai", has_bias=True)
    part = experts(expert, fields.num_local_experts, fields.num_experts_per_tok, has_router_bias=True)
    spans = windows(fields, lambda layer: layer % 2 == 0)
    attentions = [attention(fields, rope=rope_spec, window=window, has_sinks=True) for window in spans]
    return model(fields, attentions, part, names=_NAMES)
