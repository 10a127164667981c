"""Qwen3-Next and Qwen 3.5 and 3.6: gated delta rule in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta, structs

from eventlm.models.families.fields import (
    ConfigError,
    Fields,
    HeadSize,
    NumExperts,
    NumHeads,
    Positive,
    Size,
    attention,
    experts,
    feed_forward,
    hybrid,
    model,
    rope,
    stacked,
)
from eventlm.models.spec import DeltaSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, TensorNames

DELTA = "linear_attention"
#: Layers that predict several tokens at once are left in the file.
_NAMES = TensorNames(
    ignored=("mtp.",),
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
)
_NEXT_NAMES = structs.replace(
    _NAMES, mixed_and_gate="linear_attn.in_proj_qkvz", beta_and_decay="linear_attn.in_proj_ba"
)


class Qwen35Fields(Fields, frozen=True, kw_only=True):
    """A quarter of each head is rotated unless config.json says otherwise.

    A vision model's positions of three axes are one for text. linear_value_heads_interleaved: of GGUF files, see
    `DeltaSpec.is_interleaved`.
    """

    REFUSED: ClassVar[tuple[str, ...]] = (*Fields.REFUSED, "attention_bias")
    num_key_value_heads: NumHeads | None = 4
    head_dim: HeadSize | None = 256
    full_attention_interval: Positive = 4
    linear_conv_kernel_dim: Positive = 4
    linear_key_head_dim: HeadSize = 128
    linear_value_head_dim: HeadSize = 128
    linear_num_key_heads: NumHeads = 16
    linear_num_value_heads: NumHeads = 32
    linear_value_heads_interleaved: bool = False
    mtp_num_hidden_layers: Annotated[int, Meta(ge=0, le=1024)] | None = None


def qwen3_5(fields: Qwen35Fields) -> ModelSpec:
    """Qwen 3 with output gates, norms of unit offset, and the delta rule in most layers."""
    return _hybrid(fields, [feed_forward(fields, has_bias=False)] * fields.num_hidden_layers)


class Qwen35MoeFields(Qwen35Fields, frozen=True, kw_only=True):
    """All layers have experts, and no neurons of `intermediate_size`."""

    intermediate_size: Size = 512
    num_key_value_heads: NumHeads | None = 2
    num_experts: NumExperts = 256
    num_experts_per_tok: NumExperts = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512


def qwen3_5_moe(fields: Qwen35MoeFields) -> ModelSpec:
    """Qwen 3.5 with experts, and a shared one behind a gate."""
    return _hybrid(fields, [_mixture(fields, is_normalized=True)] * fields.num_hidden_layers)


class Qwen3NextFields(Qwen35MoeFields, frozen=True, kw_only=True):
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""

    intermediate_size: Size = 5632
    num_experts: NumExperts = 512
    num_experts_per_tok: NumExperts = 10
    decoder_sparse_step: Positive = 1
    mlp_only_layers: list[int] | None = None
    norm_topk_prob: bool = True


def qwen3_next(fields: Qwen3NextFields) -> ModelSpec:
    """As Qwen 3.5 with experts, with other tensors."""
    dense, mixture = feed_forward(fields, has_bias=False), _mixture(fields, is_normalized=fields.norm_topk_prob)
    dense_layers = set(fields.mlp_only_layers or ())
    parts = [
        dense if layer in dense_layers or (layer + 1) % fields.decoder_sparse_step else mixture
        for layer in range(fields.num_hidden_layers)
    ]
    return _hybrid(fields, parts, _NEXT_NAMES)


def _mixture(fields: Qwen35MoeFields, *, is_normalized: bool) -> ExpertsSpec:
    return experts(
        feed_forward(fields, size=fields.moe_intermediate_size, has_bias=False),
        fields.num_experts,
        fields.num_experts_per_tok,
        is_normalized=is_normalized,
        shared=feed_forward(fields, size=fields.shared_expert_intermediate_size, has_bias=False),
        has_shared_gate=True,
    )


def _hybrid(
    fields: Qwen35Fields, parts: Sequence[FeedForwardSpec | ExpertsSpec], names: TensorNames = _NAMES
) -> ModelSpec:
    keys, values = fields.linear_num_key_heads, fields.linear_num_value_heads
    if values % keys:
        raise ConfigError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    if fields.hidden_act != "silu":
        raise ConfigError(f"hidden_act {fields.hidden_act} is not supported, which convolutions have too")
    delta = DeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.linear_key_head_dim,
        value_dim=fields.linear_value_head_dim,
        num_taps=fields.linear_conv_kernel_dim,
        is_interleaved=fields.linear_value_heads_interleaved,
    )
    first = fields.num_hidden_layers
    drafting = (f"model.layers.{first + number}." for number in range(fields.mtp_num_hidden_layers or 0))
    names = structs.replace(names, ignored=(*names.ignored, *drafting))
    attended = attention(fields, rope=rope(fields, partial=0.25), qk_norm="head", has_output_gate=True)
    interval = fields.full_attention_interval
    return model(
        fields,
        hybrid(fields, attended, delta, DELTA, lambda layer: (layer + 1) % interval != 0),
        parts,
        norm={"offset": 1.0},
        names=names,
        other_names=stacked(names),
    )
