"""Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Literal

from eventlm.models.families.fields import (
    FULL,
    SLIDING,
    ConfigError,
    Context,
    Fields,
    HeadSize,
    NumHeads,
    NumLayers,
    Positive,
    PositiveFloat,
    Size,
    activation,
    attention,
    feed_forward,
    layer_kinds,
    model,
    rope,
    rope_fields,
    window_of,
)
from eventlm.models.spec import ModelSpec, RopeSpec, TensorNames

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_NAMES = TensorNames(feed_forward_norm="pre_feedforward_layernorm")


class GemmaFields(Fields, frozen=True, kw_only=True):
    """`hidden_activation` is a later name of `hidden_act`."""

    num_key_value_heads: NumHeads | None = 16
    head_dim: HeadSize | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    hidden_activation: str | None = None


def gemma(fields: GemmaFields) -> ModelSpec:
    """Norms whose weights are stored less one, GeGLU, embeddings multiplied by the root of their size."""
    name = fields.hidden_activation or fields.hidden_act
    # Early config.json files name an activation that was not meant.
    part = feed_forward(fields, activation=activation("gelu_pytorch_tanh" if name == "gelu" else name))
    return model(fields, attention(fields), part, norm={"offset": 1.0}, embedding_multiplier=fields.hidden_size**0.5)


class Gemma2Fields(Fields, frozen=True, kw_only=True):
    """Scores are divided by the root of `query_pre_attn_scalar`."""

    num_key_value_heads: NumHeads | None = 4
    head_dim: HeadSize | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: Positive | None = 4096
    final_logit_softcapping: PositiveFloat | None = 30.0
    attn_logit_softcapping: PositiveFloat | None = 50.0


def gemma2(fields: Gemma2Fields) -> ModelSpec:
    """Gemma with norms after both parts too, windows in every other layer, and soft caps."""
    rope_spec = rope(fields)
    kinds = layer_kinds(fields, lambda layer: layer % 2 == 0)
    return _gemma(fields, kinds, {FULL: rope_spec, SLIDING: rope_spec}, "none")


class Gemma3Fields(Gemma2Fields, frozen=True, kw_only=True):
    """Layers with windows rotate differently. Multimodal checkpoints leave out what is the default."""

    vocab_size: Positive = 262_208
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: NumLayers = 26
    num_attention_heads: NumHeads = 8
    max_position_embeddings: Context = 131_072
    final_logit_softcapping: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    sliding_window_pattern: Positive = 6


def gemma3(fields: Gemma3Fields) -> ModelSpec:
    """Gemma 2 with windows in five of six layers, and norms of each head's query and key in place of soft caps."""
    if fields.attn_logit_softcapping is not None:
        raise ConfigError(f"attn_logit_softcapping {fields.attn_logit_softcapping} is not supported")
    kinds = layer_kinds(fields, lambda layer: (layer + 1) % fields.sliding_window_pattern != 0)
    ropes = {
        FULL: rope(fields, rope_fields(fields, FULL), theta=fields.rope_theta or _GLOBAL_THETA),
        SLIDING: rope(fields, rope_fields(fields, SLIDING), theta=fields.rope_local_base_freq or _LOCAL_THETA),
    }
    return _gemma(fields, kinds, ropes, "head")


def _gemma(
    fields: Gemma2Fields, kinds: list[str], ropes: dict[str, RopeSpec], qk_norm: Literal["none", "head"]
) -> ModelSpec:
    attentions = [
        attention(
            fields,
            rope=ropes[kind],
            scale=fields.query_pre_attn_scalar**-0.5,
            window=window_of(fields, kind),
            soft_cap=fields.attn_logit_softcapping or 0.0,
            qk_norm=qk_norm,
        )
        for kind in kinds
    ]
    return model(
        fields,
        attentions,
        feed_forward(fields, activation=activation(fields.hidden_activation)),
        layer={"norms": "both"},
        norm={"offset": 1.0},
        names=_NAMES,
        embedding_multiplier=fields.hidden_size**0.5,
        logits_soft_cap=fields.final_logit_softcapping or 0.0,
        # Stretched already, also where the rotary embedding is scaled linearly.
        max_position_embeddings=fields.max_position_embeddings,
    )
