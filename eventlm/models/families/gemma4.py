"""Gemma 4."""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.models.families.fields import (
    FULL,
    SLIDING,
    ConfigError,
    Context,
    Fields,
    HeadSize,
    NotNegative,
    NumExperts,
    NumHeads,
    NumLayers,
    Positive,
    PositiveFloat,
    RopeFields,
    Size,
    activation,
    attention,
    experts,
    feed_forward,
    layer_kinds,
    model,
    rope,
    rope_fields,
    window_of,
)
from eventlm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    ModelSpec,
    RopeSpec,
    TensorNames,
)

_NAMES = TensorNames(
    feed_forward_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert_gate_up="experts.gate_up_proj",
    expert_down="experts.down_proj",
    stacking="rows",
    shared_gate="mlp.gate_proj",
    shared_up="mlp.up_proj",
    shared_down="mlp.down_proj",
)
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
#: Of layers without a window, where config.json has no `rope_parameters`.
_GLOBAL_ROPE = RopeFields(rope_type="proportional", partial_rotary_factor=0.25)
#: What one layer may have of its own.
_OF_A_LAYER = ("head_dim", "num_key_value_heads")
#: Checkpoints have these of layers that attend to the keys of others, too.
_UNUSED = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


class Gemma4Fields(Fields, frozen=True, kw_only=True):
    """Layers without a window have heads of another size, see `per_layer_config`. Of the rest, see `spec.py`."""

    REFUSED = tuple(name for name in Fields.REFUSED if name != "use_bidirectional_attention")

    vocab_size: Positive = 262_144
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: NumLayers = 30
    num_attention_heads: NumHeads = 8
    num_key_value_heads: NumHeads | None = 4
    head_dim: HeadSize | None = 256
    max_position_embeddings: Context = 131_072
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: Positive | None = 512
    final_logit_softcapping: PositiveFloat | None = None
    vocab_size_per_layer_input: Positive = 262_144
    hidden_size_per_layer_input: NotNegative | None = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: NotNegative | None = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: NumExperts | None = None
    top_k_experts: NumExperts | None = None
    moe_intermediate_size: Size | None = None
    global_head_dim: HeadSize = 512
    num_global_key_value_heads: NumHeads | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None


class Gemma4UnifiedFields(Gemma4Fields, frozen=True, kw_only=True):
    """Pictures and sounds enter without a tower."""

    max_position_embeddings: Context = 262_144
    sliding_window: Positive | None = 1024


def gemma4(fields: Gemma4Fields) -> ModelSpec:
    """Gemma 3 with normed values, which may be the keys, and perhaps shared keys, inputs of each layer, or experts."""
    if fields.use_bidirectional_attention not in (None, "vision"):
        raise ConfigError(f"use_bidirectional_attention {fields.use_bidirectional_attention!s:.80} is not supported")
    for name in fields.per_layer_config or {}:
        if name not in map(str, range(fields.num_hidden_layers)):
            raise ConfigError(
                f"per_layer_config has {name!r:.80}, which is no number of a layer from 0 to "
                f"{fields.num_hidden_layers - 1}"
            )
    # As transformers does.
    kinds = [*layer_kinds(fields, lambda layer: (layer + 1) % 6 != 0)[:-1], FULL]
    fields = msgspec.structs.replace(fields, layer_types=kinds)
    attentions = [_attention(fields, layer, kind) for layer, kind in enumerate(kinds)]
    first_shared = fields.num_hidden_layers - (fields.num_kv_shared_layers or 0)
    for layer in range(max(first_shared, 0), fields.num_hidden_layers):
        attentions[layer] = _shared(attentions, kinds, layer, first_shared)
    kind = activation(fields.hidden_activation)
    size, inputs = fields.hidden_size_per_layer_input, None
    if size:
        if fields.vocab_size_per_layer_input < fields.vocab_size:
            raise ConfigError(
                f"vocab_size_per_layer_input {fields.vocab_size_per_layer_input} is less than vocab_size "
                f"{fields.vocab_size}"
            )
        inputs = LayerInputsSpec(size=size, vocab_size=fields.vocab_size_per_layer_input, activation=kind)
    dense, wide = (feed_forward(fields, activation=kind, size=factor * fields.intermediate_size) for factor in (1, 2))
    return model(
        fields,
        attentions,
        [_part(fields, wide if one.keys_of >= 0 and fields.use_double_wide_mlp else dense) for one in attentions],
        layer={"norms": "both", "has_scale": True},
        names=msgspec.structs.replace(
            _NAMES,
            ignored=tuple(
                f"model.layers.{layer}.self_attn.{name}"
                for layer in range(first_shared, fields.num_hidden_layers)
                for name in _UNUSED
            ),
        ),
        embedding_multiplier=fields.hidden_size**0.5,
        logits_soft_cap=fields.final_logit_softcapping or 0.0,
        layer_inputs=inputs,
    )


def gemma4_unified(fields: Gemma4UnifiedFields) -> ModelSpec:
    """Gemma 4 without experts and inputs of layers."""
    return gemma4(msgspec.structs.replace(fields, hidden_size_per_layer_input=0, enable_moe_block=False))


def _attention(fields: Gemma4Fields, layer: int, kind: str) -> AttentionSpec:
    changes: dict[str, Any] = {}
    if fields.per_layer_config is not None:
        changes = fields.per_layer_config.get(str(layer), {})
    elif kind == FULL:
        changes = {"head_dim": fields.global_head_dim}
        if fields.attention_k_eq_v and fields.num_global_key_value_heads is not None:
            changes["num_key_value_heads"] = fields.num_global_key_value_heads
    own = _with_own(fields, layer, changes)
    return attention(
        own,
        rope=_rope(own, kind),
        scale=1.0,
        window=window_of(fields, kind),
        qk_norm="head",
        has_value_norm=True,
        values_are_keys=fields.attention_k_eq_v and kind == FULL,
    )


def _with_own(fields: Gemma4Fields, layer: int, changes: dict[str, Any]) -> Gemma4Fields:
    """The fields as one layer has them. Raises ConfigError for others than the size and the number of heads."""
    for name, value in changes.items():
        if name not in _OF_A_LAYER:
            raise ConfigError(f"per_layer_config.{layer}.{name} is not supported (supported: {', '.join(_OF_A_LAYER)})")
        if type(value) is not int or not 1 <= value <= 4096:
            raise ConfigError(
                f"per_layer_config.{layer}.{name} is {value!r:.80}, and must be an integer from 1 to 4096"
            )
    return msgspec.structs.replace(fields, **changes)


def _rope(fields: Gemma4Fields, kind: str) -> RopeSpec:
    if kind == FULL and not fields.rope_parameters and not fields.rope_scaling:
        return rope(fields, _GLOBAL_ROPE, theta=_GLOBAL_THETA)
    return rope(fields, rope_fields(fields, kind), theta=_LOCAL_THETA if kind == SLIDING else _GLOBAL_THETA)


def _shared(attentions: list[AttentionSpec], kinds: list[str], layer: int, first_shared: int) -> AttentionSpec:
    """The attention of a layer to the keys of the last layer of its kind that has some. Raises ConfigError."""
    sources = [number for number in range(first_shared) if kinds[number] == kinds[layer]]
    if not sources:
        raise ConfigError(
            f"num_kv_shared_layers {len(kinds) - first_shared} leaves no layer of {kinds[layer]} before layer {layer} "
            "with keys of its own"
        )
    own, source = attentions[layer], attentions[sources[-1]]
    if own.kv_shape != source.kv_shape:
        raise ConfigError(
            f"layer {layer} has {own.num_kv_heads} key-value heads of {own.head_dim}, and layer {sources[-1]}, whose "
            f"keys it attends to, {source.num_kv_heads} of {source.head_dim}"
        )
    return msgspec.structs.replace(own, keys_of=sources[-1], values_are_keys=False, has_value_norm=False)


def _part(fields: Gemma4Fields, dense: FeedForwardSpec) -> FeedForwardSpec | ExpertsSpec:
    if not fields.enable_moe_block:
        return dense
    num_experts, num_active, size = fields.num_experts, fields.top_k_experts, fields.moe_intermediate_size
    if num_experts is None or num_active is None or size is None:
        raise ConfigError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size")
    return experts(
        msgspec.structs.replace(dense, size=size),
        num_experts,
        num_active,
        shared=dense,
        has_scales=True,
        has_norms=True,
        router_multiplier=fields.hidden_size**-0.5,
    )
