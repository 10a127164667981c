from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.models.spec import TensorNames
from eventlm.models.weights.tensor_names import checkpoint_tensors
from tests.models.weights.tensors import MODEL, SHARED, changed_layers


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ("before", {"input_layernorm", "post_attention_layernorm"}),
        ("after", {"post_attention_layernorm", "post_feedforward_layernorm"}),
        ("both", {"input_layernorm", "post_attention_layernorm", "pre_ffn", "post_feedforward_layernorm"}),
        ("parallel", {"input_layernorm"}),
    ],
)
def test_norms_are_where_the_layers_have_them(norms: Any, expected: set[str]) -> None:
    names = TensorNames(feed_forward_norm="pre_ffn") if norms == "both" else TensorNames()
    model = structs.replace(changed_layers(MODEL, norms=norms), names=names)
    found = [name.split(".")[3] for name in checkpoint_tensors(model) if name.startswith("model.layers.1.")]
    assert set(found) - {"self_attn", "mlp"} == expected


def test_layers_have_only_what_they_multiply_by() -> None:
    found = {name.removeprefix("model.") for name in checkpoint_tensors(SHARED)}
    assert {name for name in found if "self_attn." in name} == {
        *(f"layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "q_norm", "o_proj")),
        *("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_norm.weight"),
    }
    assert {"embed_tokens_per_layer.weight", "per_layer_model_projection.weight", "layers.0.layer_scalar"} <= found
    assert "layers.1.layer_scalar" not in found
    assert {"layers.1.router.scale", "layers.1.router.per_expert_scale"} <= found
