from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.config import (
    RopeConfig,
    kv_bytes_per_token,
    model_fingerprint,
    read_config,
    resolve_dtype,
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
    config = read_config(write(tmp_path, LLAMA))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert (config.qk_norm, config.tie_word_embeddings, config.attention_bias) == (False, False, False)
    assert config.rope == RopeConfig(original_max_position_embeddings=1024)
    assert config.rms_norm_eps == 1e-5


def test_qwen3(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, QWEN3))
    assert (config.head_dim, config.qk_norm, config.tie_word_embeddings) == (32, True, True)


def test_multi_head_attention_names_no_kv_heads(tmp_path: Path) -> None:
    values = {**LLAMA}
    del values["num_key_value_heads"]
    assert read_config(write(tmp_path, values)).num_kv_heads == 8


def test_both_spellings_of_rope_are_one(tmp_path: Path) -> None:
    llama3 = {"factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    old = read_config(
        write(tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {**llama3, "rope_type": "llama3"}})
    )
    new = read_config(
        write(tmp_path, {**LLAMA, "rope_parameters": {**llama3, "rope_type": "llama3", "rope_theta": 500000}})
    )
    assert old.rope == new.rope
    assert old.rope == RopeConfig(
        type="llama3",
        theta=500000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8,
    )
    oldest = read_config(write(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}))
    assert (oldest.rope.type, oldest.rope.factor, oldest.rope.theta) == ("linear", 2.0, 10000.0)


def test_kv_bytes_and_dtype(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, LLAMA))
    assert resolve_dtype(config, "auto") == "bfloat16"
    assert resolve_dtype(config, "float32") == "float32"
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 3 * 2 * 8 * 2
    with pytest.raises(CheckpointError, match="float64"):
        resolve_dtype(config, "float64")


def test_a_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 3}
    read_config(write(tmp_path, {**QWEN3, **unused}))
    read_config(write(tmp_path, {**QWEN3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "linear", "llama3"]),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ["yarn", "linear", "llama3"],
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
            ["rope_parameters.factor: Expected `float`, got `str`"],
        ),
        ({"rope_scaling": {"rope_theta": [1]}}, ["rope_scaling.rope_theta: Expected `float`, got `array`"]),
        ({"rope_parameters": [1, 2]}, ["rope_parameters: Expected `object | null`, got `array`"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["yarn", "supported: default, linear, llama3"]),
        ({"rope_theta": "1e6"}, ["rope_theta: Expected `float | null`, got `str`"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, ["sliding window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding window"]),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            ["awq in 4 bits)", "take", "--quantization int8"],
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, ["gptq in 8 bits"]),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, ["fp8)"]),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ["bitsandbytes in 4 bits"]),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, ["compressed-tensors"]),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["MLX in 4 bits"]),
        ({"quantization_config": "yes"}, ["an unknown method"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"num_key_value_heads": 3}, ["8", "3"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
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
        read_config(write(tmp_path, {**LLAMA, **changes}))
    message = str(error.value)
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    values = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    with pytest.raises(CheckpointError, match=r"config\.json: Object missing required field `vocab_size`"):
        read_config(write(tmp_path, values))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_config(tmp_path / "nowhere")
    for content in (b"{", b"\xff\xfe", b"[1]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_config(tmp_path)


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
    assert read_config(tmp_path).dtype == "float16"


def test_loads_no_torch() -> None:
    code = "import sys, eventlm.models.config\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
