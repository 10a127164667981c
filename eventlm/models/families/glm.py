"""GLM-4, in its two architectures, and GLM-4.5 with experts."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from eventlm.models.families.fields import (
    Fields,
    HeadSize,
    NotNegative,
    NumExperts,
    NumHeads,
    PositiveFloat,
    Size,
    attention,
    experts,
    feed_forward,
    model,
    rope,
    stacked,
)
from eventlm.models.spec import ModelSpec, TensorNames

_GLM_NAMES = TensorNames(gate_up="mlp.gate_up_proj")
_GLM4_NAMES = TensorNames(
    gate_up="mlp.gate_up_proj",
    attention_out_norm="post_self_attn_layernorm",
    feed_forward_out_norm="post_mlp_layernorm",
)


class GlmFields(Fields, frozen=True, kw_only=True):
    """Half of each head is rotated unless config.json says otherwise."""

    num_key_value_heads: NumHeads | None = 2
    head_dim: HeadSize | None = 128
    rms_norm_eps: PositiveFloat = 1.5625e-7
    attention_bias: bool = True


def glm(fields: GlmFields) -> ModelSpec:
    """Llama with biases of queries, keys and values, and a part of each head rotated, neighbouring elements."""
    return _glm(fields, names=_GLM_NAMES)


def glm4(fields: GlmFields) -> ModelSpec:
    """GLM with norms after both parts of a layer too."""
    return _glm(fields, names=_GLM4_NAMES, layer={"norms": "both"})


class Glm4MoeFields(Fields, frozen=True, kw_only=True):
    """The first `first_k_dense_replace` layers are dense. Behind the last one may lie others, which draft tokens."""

    #: Here it is a norm that other families have too.
    REFUSED: ClassVar[tuple[str, ...]] = tuple(name for name in Fields.REFUSED if name != "use_qk_norm")
    num_key_value_heads: NumHeads | None = 8
    rms_norm_eps: PositiveFloat = 1e-5
    use_qk_norm: bool = False
    moe_intermediate_size: Size = 1408
    num_experts_per_tok: NumExperts = 8
    n_routed_experts: NumExperts = 128
    n_shared_experts: NotNegative = 1
    routed_scaling_factor: float = 1.0
    n_group: NumExperts = 1
    topk_group: NumExperts = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=1024)] = 1


def glm4_moe(fields: Glm4MoeFields) -> ModelSpec:
    """Llama with experts chosen by a sigmoid and a correction, a shared one, and a part of each head rotated."""
    size, count = fields.moe_intermediate_size, fields.num_hidden_layers
    shared = feed_forward(fields, size=size * fields.n_shared_experts, has_bias=False)
    mixture = experts(
        feed_forward(fields, size=size, has_bias=False),
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        routing="sigmoid",
        has_correction=True,
        num_groups=fields.n_group,
        num_active_groups=fields.topk_group,
        is_normalized=fields.norm_topk_prob,
        min_sum=1e-20,
        scaling=fields.routed_scaling_factor,
        shared=shared if fields.n_shared_experts else None,
    )
    dense = feed_forward(fields, has_bias=False)
    names = TensorNames(ignored=tuple(f"model.layers.{count + i}." for i in range(fields.num_nextn_predict_layers)))
    return model(
        fields,
        attention(
            fields,
            rope=rope(fields, partial=0.5),
            qk_norm="head" if fields.use_qk_norm else "none",
            has_output_bias=False,
        ),
        [dense if layer < fields.first_k_dense_replace else mixture for layer in range(count)],
        names=names,
        other_names=stacked(names),
    )


def _glm(fields: GlmFields, **changes: Any) -> ModelSpec:
    rope_spec = rope(fields, partial=0.5, is_interleaved=True)
    part = feed_forward(fields, has_bias=False)
    return model(fields, attention(fields, rope=rope_spec, has_output_bias=False), part, **changes)
