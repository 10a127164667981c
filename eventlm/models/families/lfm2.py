"""LFM2, dense and with experts: short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from eventlm.models.families.fields import (
    Fields,
    NotNegative,
    NumExperts,
    NumHeads,
    Positive,
    PositiveFloat,
    Size,
    attention,
    experts,
    feed_forward,
    hybrid,
    model,
    stacked,
)
from eventlm.models.spec import ConvolutionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, TensorNames

CONVOLUTION = "conv"
_NAMES = TensorNames(
    final_norm="embedding_norm",
    attention_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    recurrent_output="conv.out_proj",
    mixed="conv.in_proj",
    taps="conv.conv",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{}.w1",
    expert_up="feed_forward.experts.{}.w3",
    expert_down="feed_forward.experts.{}.w2",
)
_STACKED = stacked(
    _NAMES, expert_gate_up="feed_forward.experts.gate_up_proj", expert_down="feed_forward.experts.down_proj"
)


class _HybridFields(Fields, frozen=True, kw_only=True):
    """`conv_L_cache` is how many tokens a convolution sees."""

    THETA: ClassVar[float] = 1_000_000.0
    num_key_value_heads: NumHeads | None = 8
    norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    #: Its former name.
    tie_embedding: bool | None = None
    conv_bias: bool = False
    conv_L_cache: Positive = 3
    full_attn_idxs: list[int] | None = None


class Lfm2Fields(_HybridFields, frozen=True, kw_only=True):
    """The size of the feed-forward part is derived from `intermediate_size`, or `block_ff_dim` if there is one."""

    block_ff_dim: Size | None = None
    block_multiple_of: Positive = 256
    block_ffn_dim_multiplier: PositiveFloat | None = 1.0
    block_auto_adjust_ff_dim: bool = True


def lfm2(fields: Lfm2Fields) -> ModelSpec:
    """Llama with a norm of each head's query and key, and convolutions in place of attention in many layers."""
    size = fields.block_ff_dim or fields.intermediate_size
    if fields.block_auto_adjust_ff_dim:
        size = int(2 * size / 3)
        if fields.block_ffn_dim_multiplier is not None:
            multiple = fields.block_multiple_of
            size = -(-int(fields.block_ffn_dim_multiplier * size) // multiple) * multiple
    return _lfm2(fields, [feed_forward(fields, size=size, has_bias=False)] * fields.num_hidden_layers)


class Lfm2MoeFields(_HybridFields, frozen=True, kw_only=True):
    """The first `num_dense_layers` have no experts."""

    num_dense_layers: NotNegative = 2
    num_experts: NumExperts = 32
    num_experts_per_tok: NumExperts = 4
    moe_intermediate_size: Size = 1792
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True


def lfm2_moe(fields: Lfm2MoeFields) -> ModelSpec:
    """LFM2 with experts, by sigmoids."""
    dense = feed_forward(fields, has_bias=False)
    mixture = experts(
        feed_forward(fields, size=fields.moe_intermediate_size, has_bias=False),
        fields.num_experts,
        fields.num_experts_per_tok,
        routing="sigmoid",
        has_correction=fields.use_expert_bias,
        is_normalized=fields.norm_topk_prob,
        # It is added to the sum there, which changes less than rounding does.
        min_sum=1e-6,
        scaling=fields.routed_scaling_factor,
    )
    return _lfm2(
        fields,
        [dense if layer < fields.num_dense_layers else mixture for layer in range(fields.num_hidden_layers)],
    )


def _lfm2(fields: _HybridFields, parts: Sequence[FeedForwardSpec | ExpertsSpec]) -> ModelSpec:
    convolution = ConvolutionSpec(
        num_channels=fields.hidden_size, num_taps=fields.conv_L_cache, has_bias=fields.conv_bias
    )
    attends = set(fields.full_attn_idxs if fields.full_attn_idxs is not None else range(fields.num_hidden_layers))
    attended = attention(fields, qk_norm="head", has_qkv_bias=False, has_output_bias=False)
    is_tied = fields.tie_word_embeddings if fields.tie_embedding is None else fields.tie_embedding
    return model(
        fields,
        hybrid(fields, attended, convolution, CONVOLUTION, lambda layer: layer not in attends),
        parts,
        norm={"eps": fields.norm_eps},
        names=_NAMES,
        other_names=_STACKED,
        tie_word_embeddings=is_tied,
    )
