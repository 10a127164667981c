"""OLMo 1 to 3, OLMoE, and EXAONE 4, which places its norms as they do."""

from __future__ import annotations

from typing import Any, ClassVar

from eventlm.models.families.fields import (
    FULL,
    SLIDING,
    ConfigError,
    Fields,
    NumExperts,
    NumHeads,
    Positive,
    PositiveFloat,
    attention,
    experts,
    feed_forward,
    layer_kinds,
    model,
    rope,
    rope_fields,
    stacked,
    window_of,
    windows,
)
from eventlm.models.spec import ModelSpec, TensorNames

_AFTER: dict[str, Any] = {"norms": "after"}


class OlmoFields(Fields, frozen=True, kw_only=True):
    """No further fields."""


def olmo(fields: OlmoFields) -> ModelSpec:
    """Llama with LayerNorm without weights."""
    return model(fields, attention(fields), norm={"kind": "layer", "eps": 1e-5, "has_weight": False})


class Olmo2Fields(Fields, frozen=True, kw_only=True):
    """No further fields."""

    rms_norm_eps: PositiveFloat = 1e-5


def olmo2(fields: Olmo2Fields) -> ModelSpec:
    """Norms after the parts of a layer, and over all queries and all keys together."""
    return model(fields, attention(fields, qk_norm="whole"), layer=_AFTER)


class Olmo3Fields(Olmo2Fields, frozen=True, kw_only=True):
    """Only layers without windows have a scaled rotary embedding."""

    THETA: ClassVar[float] = 500_000.0
    sliding_window: Positive | None = 4096


def olmo3(fields: Olmo3Fields) -> ModelSpec:
    """OLMo 2 with windows in three of four layers."""
    kinds = layer_kinds(fields, lambda layer: (layer + 1) % 4 != 0)
    ropes = {kind: rope(fields, rope_fields(fields, kind)) for kind in (FULL, SLIDING)}
    attentions = [
        attention(fields, rope=ropes[kind], qk_norm="whole", window=window_of(fields, kind)) for kind in kinds
    ]
    return model(fields, attentions, layer=_AFTER)


class OlmoeFields(Fields, frozen=True, kw_only=True):
    """Shares of experts are normalized if `norm_topk_prob` says so."""

    rms_norm_eps: PositiveFloat = 1e-5
    num_experts: NumExperts = 64
    num_experts_per_tok: NumExperts = 8
    norm_topk_prob: bool = False


def olmoe(fields: OlmoeFields) -> ModelSpec:
    """Llama with experts, and norms over all queries and all keys together."""
    expert = feed_forward(fields, has_bias=False)
    part = experts(expert, fields.num_experts, fields.num_experts_per_tok, is_normalized=fields.norm_topk_prob)
    return model(fields, attention(fields, qk_norm="whole"), part, other_names=stacked(TensorNames()))


class Exaone4Fields(Fields, frozen=True, kw_only=True):
    """Every `sliding_window_pattern`-th layer has no window, if there are windows at all."""

    num_key_value_heads: NumHeads | None = 32
    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: Positive | None = 4096
    sliding_window_pattern: str | int | None = 4


def exaone4(fields: Exaone4Fields) -> ModelSpec:
    """OLMo 2 with a norm of each head; where there are windows, only layers with one have rotary embeddings."""
    pattern = None if fields.sliding_window is None else fields.sliding_window_pattern
    if isinstance(pattern, str) and fields.layer_types is None:
        raise ConfigError(f"sliding_window_pattern {pattern} is not supported without layer_types")
    spans = windows(fields, lambda layer: isinstance(pattern, int) and pattern > 0 and (layer + 1) % pattern != 0)
    rope_spec = rope(fields)
    attentions = [
        attention(
            fields,
            rope=rope_spec if window or fields.sliding_window is None else None,
            qk_norm="head",
            window=window,
            has_qkv_bias=False,
            has_output_bias=False,
        )
        for window in spans
    ]
    return model(fields, attentions, layer=_AFTER)
