"""Families with LayerNorm before both parts of a layer: StableLM, StarCoder 2 and Nemotron."""

from __future__ import annotations

from eventlm.models.families.fields import (
    Fields,
    NumHeads,
    PositiveFloat,
    attention,
    feed_forward,
    model,
    rope,
)
from eventlm.models.spec import ModelSpec, TensorNames

_STARCODER_NAMES = TensorNames(up="mlp.c_fc", down="mlp.c_proj")


class StableLmFields(Fields, frozen=True, kw_only=True):
    """A quarter of each head is rotated unless config.json says otherwise."""

    num_key_value_heads: NumHeads | None = 32
    layer_norm_eps: PositiveFloat = 1e-5
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False


def stablelm(fields: StableLmFields) -> ModelSpec:
    """LayerNorm and SwiGLU, a part of each head rotated, perhaps biases of queries, keys and values."""
    return model(
        fields,
        attention(fields, rope=rope(fields, partial=0.25), has_qkv_bias=fields.use_qkv_bias, has_output_bias=False),
        feed_forward(fields, has_bias=False),
        layer={"norms": "parallel" if fields.use_parallel_residual else "before"},
        norm={"kind": "layer", "eps": fields.layer_norm_eps, "has_bias": True},
    )


class Starcoder2Fields(Fields, frozen=True, kw_only=True):
    """One switch for all biases; the window is that of all layers."""

    num_key_value_heads: NumHeads | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = True


def starcoder2(fields: Starcoder2Fields) -> ModelSpec:
    """LayerNorm and GELU, biases, perhaps windows."""
    bias = fields.use_bias
    return model(
        fields,
        attention(fields, window=fields.sliding_window or 0, has_qkv_bias=bias, has_output_bias=bias),
        feed_forward(fields, is_gated=False, has_bias=bias),
        norm={"kind": "layer", "eps": fields.norm_epsilon, "has_bias": True},
        names=_STARCODER_NAMES,
    )


class NemotronFields(Fields, frozen=True, kw_only=True):
    """Half of each head is rotated unless config.json says otherwise."""

    hidden_act: str = "relu2"
    norm_eps: PositiveFloat = 1e-5


def nemotron(fields: NemotronFields) -> ModelSpec:
    """LayerNorm whose weights are stored less one, a squared ReLU without a gate, a part of each head rotated."""
    return model(
        fields,
        attention(fields, rope=rope(fields, partial=0.5)),
        feed_forward(fields, is_gated=False),
        norm={"kind": "layer", "eps": fields.norm_eps, "has_bias": True, "offset": 1.0},
    )
