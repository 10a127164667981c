from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.models.spec import TensorNames
from eventlm.models.weights.tensor_names import checkpoint_tensors
from tests.models.weights.tensors import MODEL, changed_layers


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
