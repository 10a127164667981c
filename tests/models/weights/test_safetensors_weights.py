"""What is said of a checkpoint whose weights are not those of its config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.models.program import WeightKey
from eventlm.models.spec import ModelSpec, TensorNames
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from tests.models.weights.tensors import COLUMNS, MODEL, ROWS, SPARSE, UP, Tensors, changed_layers, tensors_of, write


def test_every_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    tensors = tensors_of(MODEL)
    write(tmp_path / "model.safetensors", tensors | {"lm_head.weight": ("BF16", (48, 16))})
    [file] = find_weights(tmp_path, MODEL)
    assert [weight.name for weight in file.weights] == list(tensors)
    assert file.weights[1].offset - file.weights[0].offset == 48 * 16 * 2


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


@pytest.mark.parametrize(
    ("names", "end", "missing"),
    [
        (TensorNames(), ".experts.2.down_proj.weight", "mlp.experts.2.down_proj.weight is missing;"),
        (TensorNames(), ".experts.2.", "mlp.experts.2.gate_proj.weight is missing (6 are);"),
        (ROWS, ".1.experts.down_proj", "experts.down_proj is missing (2 are);"),
    ],
)
def test_what_is_missing_has_the_name_that_the_others_have(
    names: TensorNames, end: str, missing: str, tmp_path: Path
) -> None:
    """Of experts that may have tensors of their own, or one."""
    model, tensors = with_tensors(SPARSE, names)
    found = {name: tensor for name, tensor in tensors.items() if end not in name}
    write(tmp_path / "model.safetensors", found)
    model = structs.replace(model, names=TensorNames(), other_names=(ROWS,))
    with pytest.raises(CheckpointError) as caught:
        find_weights(tmp_path, model)
    assert f"tensor model.layers.1.{missing}" in str(caught.value)


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
