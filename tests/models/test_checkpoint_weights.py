"""What is said of a checkpoint whose weights are not those of its config.json."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint_weights import find_weights, weight_bytes, weight_shapes
from eventlm.models.config import DecoderConfig, RopeConfig

Tensors = dict[str, tuple[str, tuple[int, ...]]]

CONFIG = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=True,
    qk_norm=True,
    rope=RopeConfig(),
    dtype="bfloat16",
)
UP = "model.layers.1.mlp.up_proj.weight"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1}


def tensors_of(config: DecoderConfig, dtype: str = "BF16") -> Tensors:
    return {name: (dtype, shape) for name, shape in weight_shapes(config).items()}


def write(path: Path, tensors: Tensors) -> None:
    """A sound file of zeros."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))


def test_every_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    write(tmp_path / "model.safetensors", tensors | {"lm_head.weight": ("BF16", (48, 16))})
    [file] = find_weights(tmp_path, CONFIG)
    assert [tensor.name for tensor in file.tensors] == list(tensors)
    assert file.tensors[1].offset - file.tensors[0].offset == 48 * 16 * 2
    num_parameters = sum(math.prod(shape) for _, shape in tensors.values())
    assert weight_bytes(CONFIG, "bfloat16") == 2 * num_parameters
    assert weight_bytes(CONFIG, "float32") == 4 * num_parameters


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_take_what_the_decoder_has_for_them(*, tied: bool) -> None:
    from eventlm.models.loader import _empty_decoder, torch_dtype

    config = structs.replace(CONFIG, tie_word_embeddings=tied, hidden_size=80)
    decoder = _empty_decoder(config, torch_dtype("bfloat16"), "meta")
    decoder.to_int8()
    assert weight_bytes(config, "bfloat16", "int8") == sum(each.nbytes for each in decoder.parameters())


def test_dtypes_may_be_mixed_among_those_that_can_be_read(tmp_path: Path) -> None:
    mixed = tensors_of(CONFIG) | {"model.norm.weight": ("F32", (16,)), UP: ("F16", (24, 16))}
    write(tmp_path / "model.safetensors", mixed)
    find_weights(tmp_path, CONFIG)


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
        (changed("model.layers.0.mlp.up_proj.qweight", "BF16", (2,)), "qweight belongs to quantized weights, which"),
        (
            changed("model.layers.2.input_layernorm.weight", "BF16", (16,)),
            "is not one of Qwen3ForCausalLM as config.json",
        ),
        (changed("lora.weight", "BF16", (16,)), "tensor lora.weight is not one of Qwen3ForCausalLM"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, change: Callable[[Tensors], Tensors], message: str) -> None:
    path = tmp_path / "model.safetensors"
    write(path, change(tensors_of(CONFIG)))
    with pytest.raises(CheckpointError) as caught:
        find_weights(tmp_path, CONFIG)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    first = {name: tensors[name] for name in list(tensors)[:9]}
    second = {name: tensors[name] for name in list(tensors)[9:]}
    weight_map = {name: "1" if name in first else "2" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write(tmp_path / "1", first)
    write(tmp_path / "2", second)
    assert [file.path.name for file in find_weights(tmp_path, CONFIG)] == ["1", "2"]
    write(tmp_path / "2", second | dict(list(first.items())[:1]))
    with pytest.raises(CheckpointError, match=r"/2: tensor model.embed_tokens.weight is in two files"):
        find_weights(tmp_path, CONFIG)
    write(tmp_path / "2", {name: second[name] for name in second if name != UP})
    with pytest.raises(CheckpointError, match=rf"/2: tensor {UP} is missing"):
        find_weights(tmp_path, CONFIG)


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = (
        "import sys, eventlm.models.checkpoint_weights; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
