"""Phi 1 to 4."""

from __future__ import annotations

from eventlm.models.families.fields import (
    Context,
    Fields,
    PositiveFloat,
    attention,
    feed_forward,
    model,
    rope,
)
from eventlm.models.spec import ModelSpec, TensorNames

_PHI_NAMES = TensorNames(final_norm="final_layernorm", output="self_attn.dense", up="mlp.fc1", down="mlp.fc2")
_PHI3_NAMES = TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


class PhiFields(Fields, frozen=True, kw_only=True):
    """Half of each head is rotated unless config.json says otherwise."""

    hidden_act: str = "gelu_new"
    layer_norm_eps: PositiveFloat = 1e-5


def phi(fields: PhiFields) -> ModelSpec:
    """Attention and GELU side by side, LayerNorm, biases everywhere, a part of each head rotated."""
    return model(
        fields,
        attention(fields, rope=rope(fields, partial=0.5), has_qkv_bias=True, has_output_bias=True),
        feed_forward(fields, is_gated=False, has_bias=True),
        layer={"norms": "parallel"},
        norm={"kind": "layer", "eps": fields.layer_norm_eps, "has_bias": True},
        names=_PHI_NAMES,
        has_head_bias=True,
    )


class Phi3Fields(Fields, frozen=True, kw_only=True):
    """The window is that of all layers."""

    rms_norm_eps: PositiveFloat = 1e-5
    original_max_position_embeddings: Context | None = 4096


def phi3(fields: Phi3Fields) -> ModelSpec:
    """Llama with LongRoPE, perhaps on a part of each head, and perhaps windows."""
    rope_spec = rope(fields, partial=1.0)
    part = attention(
        fields, rope=rope_spec, window=fields.sliding_window or 0, has_qkv_bias=False, has_output_bias=False
    )
    return model(fields, part, feed_forward(fields, has_bias=False), names=_PHI3_NAMES)
