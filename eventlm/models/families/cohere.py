"""Command R and R7B, Aya and Command A."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from eventlm.models.families.fields import (
    Fields,
    Positive,
    PositiveFloat,
    attention,
    feed_forward,
    model,
    rope,
    windows,
)
from eventlm.models.spec import AttentionSpec, ModelSpec


class CohereFields(Fields, frozen=True, kw_only=True):
    """Logits are multiplied by `logit_scale`."""

    THETA: ClassVar[float] = 500_000.0
    layer_norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625


def cohere(fields: CohereFields) -> ModelSpec:
    """Attention and SwiGLU side by side, LayerNorm without bias, rotation of neighbouring elements, scaled logits."""
    return _cohere(fields, attention(fields, rope=rope(fields, is_interleaved=True)))


class Cohere2Fields(CohereFields, frozen=True, kw_only=True):
    """Every `sliding_window_pattern`-th layer has no window."""

    THETA: ClassVar[float] = 10_000.0
    sliding_window: Positive | None = 4096
    sliding_window_pattern: Positive = 4


def cohere2(fields: Cohere2Fields) -> ModelSpec:
    """Cohere with windows in three of four layers; the fourth has no rotary embeddings."""
    rope_spec = rope(fields, is_interleaved=True)
    spans = windows(fields, lambda layer: (layer + 1) % fields.sliding_window_pattern != 0)
    return _cohere(fields, [attention(fields, rope=rope_spec if window else None, window=window) for window in spans])


def _cohere(fields: CohereFields, attentions: AttentionSpec | Sequence[AttentionSpec]) -> ModelSpec:
    return model(
        fields,
        attentions,
        feed_forward(fields, has_bias=False),
        layer={"norms": "parallel"},
        norm={"kind": "layer", "eps": fields.layer_norm_eps},
        logits_multiplier=fields.logit_scale,
    )
