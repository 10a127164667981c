from __future__ import annotations

from msgspec import structs

from eventlm.models.spec import NormSpec
from tests.models.weights.tensors import MODEL, changed_layers, tensors_of


def test_a_norm_may_have_a_bias_or_no_weight_at_all() -> None:
    with_bias = structs.replace(MODEL, norm=NormSpec(kind="layer", eps=1e-5, has_bias=True))
    added = tensors_of(with_bias).keys() - tensors_of(MODEL).keys()
    assert added == {
        "model.norm.bias",
        *(f"model.layers.{layer}.input_layernorm.bias" for layer in (0, 1)),
        *(f"model.layers.{layer}.post_attention_layernorm.bias" for layer in (0, 1)),
    }
    without = structs.replace(MODEL, norm=NormSpec(kind="layer", eps=1e-5, has_weight=False))
    assert not [name for name in tensors_of(without) if "layernorm" in name or name == "model.norm.weight"]


def test_what_attention_also_has() -> None:
    model = changed_layers(
        MODEL, attention={"qk_norm": "whole", "has_sinks": True, "has_qkv_bias": True, "has_output_bias": True}
    )
    tensors, prefix = tensors_of(model), "model.layers.0.self_attn"
    assert tensors[f"{prefix}.q_norm.weight"] == ("BF16", (16,))
    assert tensors[f"{prefix}.k_norm.weight"] == ("BF16", (8,))
    assert tensors[f"{prefix}.sinks"] == ("BF16", (2,))
    assert {name for name in tensors if name.startswith(prefix) and name.endswith("bias")} == {
        f"{prefix}.{part}_proj.bias" for part in "qkvo"
    }


def test_a_head_has_its_bias_also_where_it_is_tied() -> None:
    model = structs.replace(MODEL, has_head_bias=True)
    assert tensors_of(model).keys() - tensors_of(MODEL).keys() == {"lm_head.bias"}
