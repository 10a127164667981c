"""Decoders without numbers: their tensors by name, dtype and shape, and files of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    TensorNames,
)
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.tensor_names import checkpoint_tensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]

LAYER = LayerSpec(
    attention=AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=8, rope=RopeSpec(rotary_dim=8), scale=8**-0.5, qk_norm="head"
    ),
    feed_forward=FeedForwardSpec(size=24, has_bias=True),
)
MODEL = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=48,
    hidden_size=16,
    layers=(LAYER, LAYER),
    norm=NormSpec(eps=1e-6),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
#: A dense layer, and one with four experts.
SPARSE = structs.replace(
    MODEL,
    architecture="Qwen3MoeForCausalLM",
    layers=(
        LAYER,
        structs.replace(
            LAYER,
            feed_forward=ExpertsSpec(
                num_experts=4,
                num_active=2,
                expert=FeedForwardSpec(size=6, has_bias=True),
                has_router_bias=True,
                has_correction=True,
                shared=FeedForwardSpec(size=12),
                has_shared_gate=True,
            ),
        ),
    ),
)
#: What Gemma 4 has: values that are keys, a layer that attends to the keys of another, and inputs of layers.
SHARED = structs.replace(
    MODEL,
    architecture="Gemma4ForCausalLM",
    layers=(
        structs.replace(LAYER, attention=structs.replace(LAYER.attention, values_are_keys=True), has_scale=True),
        structs.replace(
            LAYER,
            attention=structs.replace(LAYER.attention, keys_of=0),
            feed_forward=ExpertsSpec(
                num_experts=4,
                num_active=2,
                expert=FeedForwardSpec(size=6),
                shared=FeedForwardSpec(size=12),
                has_norms=True,
                has_scales=True,
            ),
        ),
    ),
    layer_inputs=LayerInputsSpec(size=4, vocab_size=50, activation="silu"),
)
ROWS = TensorNames(expert_gate_up="experts.gate_up_proj", expert_down="experts.down_proj", stacking="rows")
COLUMNS = structs.replace(ROWS, stacking="columns")
UP = "model.layers.1.mlp.up_proj.weight"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1}


def tensors_of(model: ModelSpec) -> Tensors:
    shapes = model_weights(model)
    return {
        name: ("BF16", (sum(shapes[key][0] for key in keys), *shapes[keys[0]][1:]))
        for name, keys in checkpoint_tensors(model).items()
    }


def changed_layers(model: ModelSpec, *, attention: Any = None, feed_forward: Any = None, **changes: Any) -> ModelSpec:
    """The model with other fields of all layers, and of their parts."""
    layers = tuple(
        structs.replace(
            layer,
            attention=structs.replace(layer.attention, **attention or {}),
            feed_forward=structs.replace(layer.feed_forward, **feed_forward or {}),
            **changes,
        )
        for layer in model.layers
    )
    return structs.replace(model, layers=layers)


def write(path: Path, tensors: Tensors) -> None:
    """A sound file of zeros."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
