from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderRow, DrawRows, KVLayers
from eventlm.kernels.cpu.native import available_builds
from eventlm.kernels.sequence_states import StateRow, StepStates
from eventlm.models.config import activation_bytes, kv_bytes_per_token, model_fingerprint, read_model, resolve_dtype
from eventlm.models.cpu_kernels import native_model
from eventlm.models.rope import compiled_angles
from eventlm.models.spec import (
    AttentionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    why_not_plain,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True}


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_llama(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, LLAMA))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (3, 8, 2, 8)
    assert model.layers[2].feed_forward == FeedForwardSpec(size=128)
    assert (model.tie_word_embeddings, model.dtype) == (False, "bfloat16")
    assert model.norm == NormSpec(eps=1e-5)
    assert model.ropes == (RopeSpec(rotary_dim=8, original_max_position_embeddings=1024),)
    assert (model.attention.qk_norm, model.attention.has_qkv_bias) == ("none", False)
    assert not why_not_plain(model)


def test_qwen3(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, QWEN3))
    assert (model.head_dim, model.attention.qk_norm, model.tie_word_embeddings) == (32, "head", True)
    assert not why_not_plain(model)


def test_multi_head_attention_names_no_kv_heads(tmp_path: Path) -> None:
    values = {**LLAMA}
    del values["num_key_value_heads"]
    assert read_model(write(tmp_path, values)).num_kv_heads == 8


GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 1024},
    "vision_config": {"hidden_size": 8},
}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": None},
}


def test_the_decoder_of_a_multimodal_model(tmp_path: Path) -> None:
    gemma = read_model(write(tmp_path, GEMMA3))
    assert (gemma.architecture, gemma.dtype) == ("Gemma3ForConditionalGeneration", "bfloat16")
    # Its config.json leaves these to the class.
    assert (gemma.hidden_size, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (2304, 8, 4, 256)
    assert (gemma.vocab_size, gemma.max_position_embeddings, gemma.tie_word_embeddings) == (262_208, 131_072, True)
    mistral = read_model(write(tmp_path, MISTRAL3))
    assert (mistral.tie_word_embeddings, mistral.dtype, mistral.num_layers) == (False, "bfloat16", 3)
    # As transformers has it, the whole model's word counts, if it says one.
    assert read_model(write(tmp_path, MISTRAL3 | {"dtype": "float16"})).dtype == "float16"
    assert read_model(write(tmp_path, MISTRAL3 | {"torch_dtype": "float16"})).dtype == "float16"
    assert read_model(write(tmp_path, MISTRAL3 | {"dtype": None})).dtype == "bfloat16"
    assert read_model(write(tmp_path, MISTRAL3 | {"tie_word_embeddings": True})).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {**LLAMA, "model_type": "mamba"}}, "text_config: model_type mamba is not supported"),
        (
            {"text_config": {**LLAMA, "model_type": "mistral", "hidden_size": "64"}},
            "text_config.hidden_size: Expected `int`, got `str`",
        ),
        ({"text_config": {**LLAMA, "model_type": ["mistral"]}}, "text_config.model_type: Expected `str | null`"),
        ({"text_config": {**LLAMA, "quantization_config": {"quant_method": "hqq"}}}, "quantized"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized"),
    ],
)
def test_multimodal_models_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(write(tmp_path, MISTRAL3 | changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kv_bytes_and_dtype(tmp_path: Path) -> None:
    config = read_model(write(tmp_path, LLAMA))
    assert resolve_dtype(config, "auto") == "bfloat16"
    assert resolve_dtype(config, "float32") == "float32"
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 3 * 2 * 8 * 2
    assert kv_bytes_per_token(config, "int8") == 2 * 3 * 2 * (8 + 4)
    wide = structs.replace(config.attention, num_kv_heads=4, head_dim=16)
    config = structs.replace(config, layers=(*config.layers, structs.replace(config.layers[0], attention=wide)))
    assert kv_bytes_per_token(config, "bfloat16") == 2 * (3 * 2 * 8 + 4 * 16) * 2
    with pytest.raises(CheckpointError, match="float64"):
        resolve_dtype(config, "float64")


class _Allocated(ctypes.Structure):
    """What glibc's mallinfo2 gives."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated_bytes() -> int:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Allocated
    found = function()
    return int(found.uordblks + found.hblkhd)


_ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, rope=RopeSpec(rotary_dim=64), scale=1.0)
_DENSE = FeedForwardSpec(size=1536)
_EXPERTS = ExpertsSpec(num_experts=64, num_active=8, expert=FeedForwardSpec(size=192))
_DELTA = DeltaSpec(num_key_heads=4, num_value_heads=8, key_dim=64, value_dim=64, num_taps=4)


def _model(*layers: LayerSpec, vocab_size: int = 64, **changes: Any) -> ModelSpec:
    return ModelSpec(
        architecture="",
        vocab_size=vocab_size,
        hidden_size=512,
        layers=layers,
        norm=NormSpec(eps=1e-6),
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **changes,
    )


@pytest.mark.skipif(not available_builds(), reason="not compiled")
@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "start"),
    [(1, 16, 0), (1, 300, 0), (64, 1, 16383)],
    ids=["a short prompt", "a prompt", "decodes of long contexts"],
)
@pytest.mark.parametrize(
    "model",
    [
        _model(LayerSpec(attention=_ATTENTION, feed_forward=_DENSE)),
        _model(LayerSpec(attention=structs.replace(_ATTENTION, window=64), feed_forward=_DENSE), vocab_size=20_000),
        _model(
            *[LayerSpec(attention=structs.replace(_ATTENTION, qk_norm="whole"), feed_forward=_DENSE, norms="both")] * 8,
            layer_inputs=LayerInputsSpec(size=256, vocab_size=64, activation="silu"),
        ),
        _model(LayerSpec(attention=_ATTENTION, feed_forward=_EXPERTS)),
        _model(
            LayerSpec(recurrent=_DELTA, feed_forward=_DENSE),
            LayerSpec(attention=structs.replace(_ATTENTION, has_output_gate=True), feed_forward=_DENSE),
        ),
    ],
)
def test_a_step_works_on_no_more_than_is_counted(model: ModelSpec, num_rows: int, num_tokens: int, start: int) -> None:
    """Nor on a third of it: with codes, whose inputs take most, and without. All rows have the same blocks."""
    context = start + num_tokens
    counted = activation_bytes(model, num_tokens=num_rows * num_tokens, num_rows=num_rows, context=context)
    ropes = [compiled_angles(rope, context) for rope in model.ropes]
    num_blocks = context // 16 + 1
    rows = [DecoderRow(start, num_tokens, array("i", range(num_blocks)))] * num_rows
    kv = KVLayers(
        [shape and torch.zeros(2, num_blocks, *shape[:1], 16, shape[1]).bfloat16() for shape in model.kv_shapes]
    )
    state_rows = [StateRow(num_tokens, slot, -1) for slot in range(num_rows)] if model.state_size else []
    states = StepStates(torch.zeros(num_rows, model.state_size), state_rows)
    draws = DrawRows([0.0] * num_rows, [0] * num_rows, [0] * num_rows)
    for types in ({}, {("output", next(iter(model.attentions)), -1): "Q8_0"}):
        decoder = CpuDecoder(available_builds()[0], native_model(model), ropes, types=types, num_threads=1)
        before = _allocated_bytes()
        hidden_TH = decoder.forward([1] * num_tokens * num_rows, rows, kv, states)
        hidden_SH = hidden_TH[num_tokens - 1 :: num_tokens]
        decoder.draw_next(hidden_SH, draws)
        logits_SV = decoder.logits(hidden_SH)
        assert logits_SV.shape == (num_rows, model.vocab_size)
        assert counted / 3 < _allocated_bytes() - before <= counted
        del decoder, hidden_TH, hidden_SH, logits_SV


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"architectures": ["Qwen3_7ForCausalLM"]},
            ["architecture 'Qwen3_7ForCausalLM' is not", "near it are Qwen3_5ForCausalLM", "docs/models.md"],
        ),
        ({"architectures": ["x" * 99_999]}, ["xx' is not supported (docs/models.md has all that are)"]),
        ({"architectures": None}, ["architectures is missing; add it", '["LlamaForCausalLM"]', "docs/models.md"]),
        ({"architectures": [], "model_type": "qwen2_moe"}, ["architectures is missing", '["Qwen2MoeForCausalLM"]']),
        ({"rope_theta": "1e6"}, ["rope_theta: Expected `float | null`, got `str`"]),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            ["hqq in 4 bits)", "take", "--quantization int8"],
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            ["quantization_config: Object missing", "group_"],
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 2}},
            ["quantization_config.bits: Invalid enum value 2"],
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ["bitsandbytes in 4 bits"]),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, ["compression_config: Object missing requ"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["MLX in 4 bits"]),
        ({"quantization_config": "yes"}, ["an unknown method"]),
        ({"hidden_size": "64"}, ["hidden_size: Expected `int`, got `str`"]),
        ({"hidden_size": [64] * 99}, ["hidden_size: Expected `int`, got `array`"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers: Expected `int` >= 1"]),
        ({"num_key_value_heads": 1.5}, ["num_key_value_heads: Expected `int | null`, got `float`"]),
        ({"vocab_size": None}, ["vocab_size: Expected `int`, got `null`"]),
        ({"mlp_bias": 1}, ["mlp_bias: Expected `bool`, got `int`"]),
        ({"dtype": 16}, ["dtype: Expected `str | null`, got `int`"]),
        ({"layer_types": "full_attention"}, ["layer_types: Expected `array | null`, got `str`"]),
        (
            {"architectures": "LlamaForCausalLM"},
            ["architectures: Expected `array | null`, got `str`"],
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        read_model(write(tmp_path, {**LLAMA, **changes}))
    message = str(error.value)
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_quantization_of_nothing_is_none(tmp_path: Path) -> None:
    assert read_model(write(tmp_path, LLAMA | {"quantization_config": {}})).num_layers == 3


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """Of a multimodal model too, which transformers 5 writes as tied whether it is or not."""
    write(tmp_path, MISTRAL3 | {"tie_word_embeddings": True})
    names = "model.language_model.embed_tokens.weight", "lm_head.weight"
    for second, is_tied in (bytes(32), True), (bytes(31) + b"\1", False):
        offsets = {name: [32 * number, 32 * number + 32] for number, name in enumerate(names)}
        header = {name: {"dtype": "BF16", "shape": [2, 8], "data_offsets": each} for name, each in offsets.items()}
        start = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(len(start).to_bytes(8, "little") + start + bytes(32) + second)
        assert read_model(tmp_path).tie_word_embeddings == is_tied


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    values = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    with pytest.raises(CheckpointError, match=r"config\.json: Object missing required field `vocab_size`"):
        read_model(write(tmp_path, values))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_model(tmp_path / "nowhere")
    for content in (b"{", b"\xff\xfe", b"[1]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_model(tmp_path)


def write_weights(folder: Path, data: bytes, name: str = "model.safetensors") -> Path:
    header = json.dumps({"w": {"dtype": "F16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}}).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def test_fingerprint_names_the_checkpoint(tmp_path: Path) -> None:
    write_weights(write(tmp_path, LLAMA), bytes(100_000))
    first = model_fingerprint(tmp_path)
    assert len(first) == 32
    assert model_fingerprint(tmp_path) == first
    write_weights(tmp_path, b"\1" * 100_000)
    second = model_fingerprint(tmp_path)
    write_weights(tmp_path, bytes(100_002))
    third = model_fingerprint(tmp_path)
    write(tmp_path, {**LLAMA, "rope_theta": 5.0})
    assert len({first, second, third, model_fingerprint(tmp_path)}) == 4


def test_dtype_of_the_weights_where_config_names_none(tmp_path: Path) -> None:
    values = {**LLAMA}
    del values["torch_dtype"]
    write_weights(write(tmp_path, values), bytes(8))
    assert read_model(tmp_path).dtype == "float16"


def test_loads_no_torch() -> None:
    code = "import sys, eventlm.models.config\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_quantized_is_computed_in_bfloat16(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    model = read_model(write(tmp_path, LLAMA | {"dtype": "float16", "quantization_config": config}))
    assert model.quantized is not None
    assert (model.quantized.name, model.dtype) == ("awq", "bfloat16")
    inner = MISTRAL3["text_config"] | {"quantization_config": config}
    assert read_model(write(tmp_path, MISTRAL3 | {"text_config": inner})).quantized == model.quantized
