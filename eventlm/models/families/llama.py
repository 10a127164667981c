"""Llama, and what differs from it in numbers, biases or the way of rotation alone."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from eventlm.models.families.fields import (
    ConfigError,
    Fields,
    HeadSize,
    NotNegative,
    NumExperts,
    NumHeads,
    Positive,
    PositiveFloat,
    Size,
    attention,
    experts,
    feed_forward,
    model,
    rope,
    stacked,
    windows,
)
from eventlm.models.spec import AttentionSpec, ExpertsSpec, ModelSpec, TensorNames

_GRANITE_MOE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_gate_up="block_sparse_moe.input_linear.weight",
    expert_down="block_sparse_moe.output_linear.weight",
    stacking="rows",
    shared_gate_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
)
_GRANITE_MOE_OTHER_NAMES = stacked(
    _GRANITE_MOE_NAMES,
    router="block_sparse_moe.router",
    expert_gate_up="block_sparse_moe.experts.gate_up_proj",
    expert_down="block_sparse_moe.experts.down_proj",
)


class LlamaFields(Fields, frozen=True, kw_only=True):
    """No further fields."""


def llama(fields: LlamaFields) -> ModelSpec:
    """Pre-norm attention and SwiGLU."""
    return model(fields, attention(fields))


class SmolLM3Fields(Fields, frozen=True, kw_only=True):
    """Some layers see no positions, and may have windows."""

    THETA: ClassVar[float] = 2_000_000.0
    num_key_value_heads: NumHeads | None = 4
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Positive = 4


def smollm3(fields: SmolLM3Fields) -> ModelSpec:
    """Llama with every fourth layer free of rotary embeddings."""
    count = fields.num_hidden_layers
    has_rope = fields.no_rope_layers
    if has_rope is None:
        has_rope = [(layer + 1) % fields.no_rope_layer_interval for layer in range(count)]
    if len(has_rope) != count:
        raise ConfigError(f"no_rope_layers has {len(has_rope)} entries, num_hidden_layers is {count}")
    has_windows = fields.use_sliding_window and fields.sliding_window is not None
    spans = windows(fields, lambda layer: has_windows and not has_rope[layer])
    rope_spec = rope(fields)
    attentions = [
        attention(fields, rope=rope_spec if is_rotated else None, window=window)
        for is_rotated, window in zip(has_rope, spans, strict=True)
    ]
    return model(fields, attentions)


class ArceeFields(Fields, frozen=True, kw_only=True):
    """No further fields."""

    rms_norm_eps: PositiveFloat = 1e-5
    hidden_act: str = "relu2"


def arcee(fields: ArceeFields) -> ModelSpec:
    """Llama with a squared ReLU without a gate."""
    return model(fields, attention(fields), feed_forward(fields, is_gated=False))


class SeedOssFields(Fields, frozen=True, kw_only=True):
    """The output of the attention has a bias of its own."""

    num_key_value_heads: NumHeads | None = 8
    head_dim: HeadSize | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False


def seed_oss(fields: SeedOssFields) -> ModelSpec:
    """Llama with biases of queries, keys and values, and heads of a size of their own."""
    return model(fields, attention(fields, has_output_bias=fields.attention_out_bias))


class HeliumFields(Fields, frozen=True, kw_only=True):
    """No further fields."""

    THETA: ClassVar[float] = 100_000.0
    num_key_value_heads: NumHeads | None = 20
    head_dim: HeadSize | None = 128
    rms_norm_eps: PositiveFloat = 1e-8


def helium(fields: HeliumFields) -> ModelSpec:
    """Llama with rotary embeddings of neighbouring elements."""
    return model(fields, attention(fields, rope=rope(fields, is_interleaved=True), has_output_bias=False))


class ErnieFields(Fields, frozen=True, kw_only=True):
    """One switch for all biases."""

    THETA: ClassVar[float] = 500_000.0
    num_key_value_heads: NumHeads | None = 2
    head_dim: HeadSize | None = 128
    rms_norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool | None = False


def ernie(fields: ErnieFields) -> ModelSpec:
    """Llama with rotary embeddings of neighbouring elements, and perhaps biases."""
    has_bias = bool(fields.use_bias)
    return model(fields, _ernie_attention(fields, has_bias), feed_forward(fields, has_bias=has_bias))


class ErnieMoeFields(ErnieFields, frozen=True, kw_only=True):
    """Every `moe_layer_interval`-th layer of a range has experts; -1 is the last one."""

    num_key_value_heads: NumHeads | None = 4
    head_dim: HeadSize | None = None
    moe_intermediate_size: Size = 1536
    moe_k: NumExperts = 6
    moe_num_experts: NumExperts = 64
    moe_num_shared_experts: NotNegative = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Positive = 1
    moe_norm_min: float = 1e-12


def ernie_moe(fields: ErnieMoeFields) -> ModelSpec:
    """ERNIE with experts chosen by a softmax and a correction, and perhaps shared ones."""
    has_bias, size = bool(fields.use_bias), fields.moe_intermediate_size
    shared = feed_forward(fields, size=size * fields.moe_num_shared_experts, has_bias=has_bias)
    mixture = experts(
        feed_forward(fields, size=size, has_bias=False),
        fields.moe_num_experts,
        fields.moe_k,
        has_correction=True,
        min_sum=fields.moe_norm_min,
        shared=shared if fields.moe_num_shared_experts else None,
    )
    dense, count = feed_forward(fields, has_bias=has_bias), fields.num_hidden_layers
    end = count - 1 if fields.moe_layer_end_index == -1 else fields.moe_layer_end_index
    sparse = [
        fields.moe_layer_start_index <= layer <= end and (layer + 1) % fields.moe_layer_interval == 0
        for layer in range(count)
    ]
    # Other tensors are of layers that draft tokens.
    names = TensorNames(correction="mlp.moe_statics.e_score_correction_bias", ignored=("model.mtp_",))
    return model(
        fields,
        _ernie_attention(fields, has_bias),
        [mixture if is_sparse else dense for is_sparse in sparse],
        names=names,
        other_names=stacked(names, correction="mlp.gate.moe_statics.e_score_correction_bias"),
        has_head_bias=has_bias,
    )


def _ernie_attention(fields: ErnieFields, has_bias: bool) -> AttentionSpec:
    rope_spec = rope(fields, is_interleaved=True)
    return attention(fields, rope=rope_spec, has_qkv_bias=has_bias, has_output_bias=has_bias)


class GraniteFields(Fields, frozen=True, kw_only=True):
    """Logits are divided by `logits_scaling`."""

    embedding_multiplier: float = 1.0
    attention_multiplier: PositiveFloat = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: PositiveFloat = 1.0


def granite(fields: GraniteFields) -> ModelSpec:
    """Llama with multipliers of embeddings, scores, the residual stream and logits."""
    return _granite(fields)


class GraniteMoeFields(GraniteFields, frozen=True, kw_only=True):
    """No shared expert by default."""

    num_local_experts: NumExperts = 8
    num_experts_per_tok: NumExperts = 2
    shared_intermediate_size: NotNegative = 0


def granite_moe(fields: GraniteMoeFields) -> ModelSpec:
    """Granite with experts, and perhaps a shared one."""
    expert = feed_forward(fields, has_bias=False)
    size = fields.shared_intermediate_size
    part = experts(
        expert,
        fields.num_local_experts,
        fields.num_experts_per_tok,
        shared=msgspec.structs.replace(expert, size=size) if size else None,
    )
    return _granite(fields, part, names=_GRANITE_MOE_NAMES, other_names=_GRANITE_MOE_OTHER_NAMES)


def _granite(fields: GraniteFields, part: ExpertsSpec | None = None, **changes: Any) -> ModelSpec:
    return model(
        fields,
        attention(fields, scale=fields.attention_multiplier),
        part,
        layer={"residual_multiplier": fields.residual_multiplier},
        embedding_multiplier=fields.embedding_multiplier,
        logits_multiplier=1 / fields.logits_scaling,
        **changes,
    )
