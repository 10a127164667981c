"""What is said of a checkpoint whose weights are not those of its config.json."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint_weights import checkpoint_tensors, find_weights, model_weights, weight_bytes
from eventlm.models.program import WeightKey
from eventlm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    TensorNames,
)

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


def test_every_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    write(tmp_path / "model.safetensors", tensors | {"lm_head.weight": ("BF16", (48, 16))})
    [file] = find_weights(tmp_path, MODEL)
    assert [weight.name for weight in file.weights] == list(tensors)
    assert file.weights[1].offset - file.weights[0].offset == 48 * 16 * 2
    num_parameters = sum(math.prod(shape) for _, shape in tensors.values())
    assert weight_bytes(MODEL, "bfloat16") == 2 * num_parameters
    assert weight_bytes(MODEL, "float32") == 4 * num_parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", [MODEL, SPARSE])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_take_what_the_decoder_has_for_them(quantization: str, model: ModelSpec, *, tied: bool) -> None:
    from eventlm.models.loader import _empty_decoder, torch_dtype

    model = structs.replace(model, tie_word_embeddings=tied, hidden_size=80)
    decoder = _empty_decoder(model, torch_dtype("bfloat16"), "meta")
    if quantization == "int8":
        decoder.to_int8()
    tensors = {id(each): each for each in (*decoder.weights.values(), *decoder.scales.values())}
    assert weight_bytes(model, "bfloat16", quantization) == sum(each.nbytes for each in tensors.values())


def test_dtypes_may_be_mixed_among_those_that_can_be_read(tmp_path: Path) -> None:
    mixed = tensors_of(MODEL) | {"model.norm.weight": ("F32", (16,)), UP: ("F16", (24, 16))}
    write(tmp_path / "model.safetensors", mixed)
    find_weights(tmp_path, MODEL)


def changed(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: (dtype, shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {name: t[name] for name in t if name != UP}, f"tensor {UP} is missing; download"),
        (
            lambda t: {name: t[name] for name in t if "mlp.up_" not in name},
            "layers.0.mlp.up_proj.weight is missing (4 are)",
        ),
        (
            changed(UP, "BF16", (16, 24)),
            f"tensor {UP} has shape [16, 24], by config.json it is [24, 16]; the two files",
        ),
        (changed(UP, "BF16", (384,)), f"tensor {UP} has shape [384], by config.json it is [24, 16]"),
        (changed(UP, "I64", (24, 16)), f"tensor {UP} has dtype I64, which weights never have (supported: BF16, F16,"),
        (changed(UP, "F8_E4M3", (24, 16)), f"tensor {UP} has dtype F8_E4M3, as quantized weights have (supported"),
        (changed(UP, "U8", (192, 1)), f"tensor {UP} has dtype U8, as quantized weights have"),
        (changed("model.layers.0.mlp.up_proj.qweight", "BF16", (2,)), "qweight belongs to quantized weights, and by"),
        (
            changed("model.layers.2.input_layernorm.weight", "BF16", (16,)),
            "is not one of Qwen3ForCausalLM as config.json",
        ),
        (changed("lora.weight", "BF16", (16,)), "tensor lora.weight is not one of Qwen3ForCausalLM"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, change: Callable[[Tensors], Tensors], message: str) -> None:
    path = tmp_path / "model.safetensors"
    write(path, change(tensors_of(MODEL)))
    with pytest.raises(CheckpointError) as caught:
        find_weights(tmp_path, MODEL)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    first = {name: tensors[name] for name in list(tensors)[:9]}
    second = {name: tensors[name] for name in list(tensors)[9:]}
    weight_map = {name: "1" if name in first else "2" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write(tmp_path / "1", first)
    write(tmp_path / "2", second)
    assert [file.path.name for file in find_weights(tmp_path, MODEL)] == ["1", "2"]
    write(tmp_path / "2", second | dict(list(first.items())[:1]))
    with pytest.raises(CheckpointError, match=r"/2: tensor model.embed_tokens.weight is in two files"):
        find_weights(tmp_path, MODEL)
    write(tmp_path / "2", {name: second[name] for name in second if name != UP})
    with pytest.raises(CheckpointError, match=rf"/2: tensor {UP} is missing"):
        find_weights(tmp_path, MODEL)


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


def test_rows_of_a_fused_tensor_are_weights_of_their_own(tmp_path: Path) -> None:
    fused = TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
    model = structs.replace(changed_layers(MODEL, attention={"has_qkv_bias": True}), names=fused)
    tensors = tensors_of(model)
    assert tensors["model.layers.1.self_attn.qkv_proj.weight"] == ("BF16", (32, 16))
    assert tensors["model.layers.1.self_attn.qkv_proj.bias"] == ("BF16", (32,))
    assert tensors["model.layers.1.mlp.gate_up_proj.weight"] == ("BF16", (48, 16))
    write(tmp_path / "model.safetensors", tensors)
    [file] = find_weights(tmp_path, model)
    places = {weight.key: (weight.offset, weight.shape) for weight in file.weights}
    query, key, value = (places[WeightKey(name, 1, "weight")] for name in ("query", "key", "value"))
    assert [shape for _, shape in (query, key, value)] == [(16, 16), (8, 16), (8, 16)]
    assert [offset - query[0] for offset, _ in (key, value)] == [2 * 16 * 16, 2 * 24 * 16]
    bias, value_bias = (places[WeightKey(name, 1, "bias")] for name in ("query", "value"))
    assert value_bias == (bias[0] + 2 * 24, (8,))
    assert places.keys() == model_weights(model).keys()
    ends = sorted((offset, offset + 2 * math.prod(shape)) for offset, shape in places.values())
    assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]


def with_tensors(model: ModelSpec, names: TensorNames) -> tuple[ModelSpec, Tensors]:
    """The model with these names, and its tensors as they lie."""
    model = structs.replace(model, names=names)
    tensors = tensors_of(model)
    if names.stacking:
        layer = "model.layers.1.experts"
        matrices = {"gate_up_proj": (4, 12, 16), "down_proj": (4, 16, 6)}
        if names.stacking == "columns":
            matrices = {name: (num, columns, rows) for name, (num, rows, columns) in matrices.items()}
        vectors = {"gate_up_proj_bias": (4, 12), "down_proj_bias": (4, 16)}
        tensors |= {f"{layer}.{name}": ("BF16", shape) for name, shape in (matrices | vectors).items()}
    return model, tensors


def test_experts_have_tensors_of_their_own(tmp_path: Path) -> None:
    tensors = tensors_of(SPARSE)
    prefix = "model.layers.1.mlp"
    assert tensors[f"{prefix}.experts.3.down_proj.weight"] == ("BF16", (16, 6))
    assert tensors[f"{prefix}.experts.3.up_proj.bias"] == ("BF16", (6,))
    assert tensors[f"{prefix}.gate.weight"] == ("BF16", (4, 16))
    assert tensors[f"{prefix}.gate.bias"] == ("BF16", (4,))
    assert tensors[f"{prefix}.gate.e_score_correction_bias"] == ("BF16", (4,))
    assert tensors[f"{prefix}.shared_experts.up_proj.weight"] == ("BF16", (12, 16))
    assert tensors[f"{prefix}.shared_expert_gate.weight"] == ("BF16", (1, 16))
    assert tensors["model.layers.0.mlp.up_proj.weight"] == ("BF16", (24, 16))
    # ERNIE's correction is a matrix.
    tensors[f"{prefix}.gate.e_score_correction_bias"] = ("F32", (1, 4))
    write(tmp_path / "model.safetensors", tensors)
    [file] = find_weights(tmp_path, SPARSE)
    assert [weight.key for weight in file.weights] == list(model_weights(SPARSE))


@pytest.mark.parametrize("names", [ROWS, COLUMNS])
def test_experts_may_lie_in_one_tensor(tmp_path: Path, names: TensorNames) -> None:
    model, tensors = with_tensors(SPARSE, names)
    write(tmp_path / "model.safetensors", tensors)
    [file] = find_weights(tmp_path, structs.replace(model, names=TensorNames(), other_names=(names,)))
    of_experts = [weight for weight in file.weights if weight.key.expert >= 0]
    assert {key for each in of_experts for key in each.interleaved or (each.key,)} == {
        key for key in model_weights(SPARSE) if key.expert >= 0
    }
    first, third = ({each.name: each for each in of_experts if each.key.expert == number} for number in (0, 2))
    name = "model.layers.1.experts.gate_up_proj"
    assert third[name].offset - first[name].offset == 2 * 2 * 12 * 16
    if names.stacking == "columns":
        assert [key.name for key in third[name].interleaved] == ["gate", "up"]
        assert (third[name].shape, third[f"{name}_bias"].shape) == ((16, 12), (12,))
    else:
        assert (third[name].shape, third[f"{name}_bias"].shape) == ((6, 16), (6,))


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (
            TensorNames(),
            lambda t: {name: t[name] for name in t if ".experts.2." not in name},
            "tensor model.layers.1.mlp.experts.2.gate_proj.weight is missing (6 are); download",
        ),
        (
            TensorNames(),
            changed("model.layers.1.mlp.experts.4.up_proj.weight", "BF16", (6, 16)),
            "tensor model.layers.1.mlp.experts.4.up_proj.weight is not one of Qwen3MoeForCausalLM as config.json",
        ),
        (
            TensorNames(),
            changed("model.layers.1.mlp.gate.weight", "BF16", (5, 16)),
            "tensor model.layers.1.mlp.gate.weight has shape [5, 16], by config.json it is [4, 16]",
        ),
        (
            TensorNames(),
            changed("model.layers.1.mlp.gate.e_score_correction_bias", "F32", (2, 4)),
            "has shape [2, 4], by config.json it is [4]",
        ),
        (
            ROWS,
            changed("model.layers.1.experts.gate_up_proj", "BF16", (5, 12, 16)),
            "tensor model.layers.1.experts.gate_up_proj has shape [5, 12, 16], by config.json it is [4, 12, 16]; the",
        ),
        (
            ROWS,
            changed("model.layers.1.experts.down_proj", "BF16", (4, 6, 16)),
            "has shape [4, 6, 16], by config.json it is [4, 16, 6]",
        ),
        (
            ROWS,
            changed("model.layers.1.experts.down_proj", "BF16", (64, 6)),
            "has shape [64, 6], by config.json it is [4, 16, 6]",
        ),
        (
            ROWS,
            lambda t: {name: t[name] for name in t if not name.endswith("experts.down_proj")},
            "tensor model.layers.1.experts.down_proj is missing; download",
        ),
        (
            COLUMNS,
            changed("model.layers.1.experts.gate_up_proj", "BF16", (4, 12, 16)),
            "has shape [4, 12, 16], by config.json it is [4, 16, 12]",
        ),
        (
            COLUMNS,
            changed("model.layers.1.experts.gate_up_proj_bias", "BF16", (3, 12)),
            "has shape [3, 12], by config.json it is [4, 12]",
        ),
        (
            COLUMNS,
            changed("model.layers.1.experts.gate_up_proj_blocks", "U8", (4, 12, 1, 16)),
            "gate_up_proj_blocks belongs to quantized weights",
        ),
    ],
)
def test_errors_name_what_is_wrong_with_experts(
    tmp_path: Path, names: TensorNames, change: Callable[[Tensors], Tensors], message: str
) -> None:
    path = tmp_path / "model.safetensors"
    model, tensors = with_tensors(SPARSE, names)
    write(path, change(tensors))
    with pytest.raises(CheckpointError) as caught:
        find_weights(tmp_path, model)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_towers_are_left_and_other_beginnings_known(tmp_path: Path) -> None:
    names = TensorNames(
        ignored=("tower.", "model.tower."),
        aliases=(("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.")),
    )
    model = structs.replace(MODEL, names=names, tie_word_embeddings=False)
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors_of(model).items()}
    write(tmp_path / "model.safetensors", {"tower.weight": ("I64", (3,)), **tensors, "model.tower.x": ("U8", (8,))})
    [file] = find_weights(tmp_path, model)
    assert [weight.name for weight in file.weights] == list(tensors)
    assert [weight.key for weight in file.weights] == list(model_weights(model))
    write(tmp_path / "model.safetensors", tensors | {f"language_model.{UP}": ("BF16", (16, 24))})
    with pytest.raises(CheckpointError, match=rf"tensor language_model.{UP} has shape \[16, 24\]"):
        find_weights(tmp_path, model)
    write(tmp_path / "model.safetensors", tensors | {"tower_of_another_kind.weight": ("BF16", (2,))})
    with pytest.raises(CheckpointError, match=r"tensor tower_of_another_kind.weight is not one of"):
        find_weights(tmp_path, model)


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = (
        "import sys, eventlm.models.checkpoint_weights; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
