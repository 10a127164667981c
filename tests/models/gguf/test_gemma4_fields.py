"""What a GGUF file says of a Gemma 4; `test_config_json.py` has whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from eventlm.errors import CheckpointError
from eventlm.models.config import model_of, read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.gguf.config_json import config_json
from eventlm.models.gguf.header import read_parts
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.families.test_gemma4 import SHARED
from tests.models.gguf.files import add_keys, finish, to_gguf

#: Two layers, of which the second has no window, heads of twice the size, and half as many.
KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": [2, 1],
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, False],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
#: Of Llama 3's scaling by 8.
LLAMA3_FACTORS = [1.0, 1.0, 1.0, 1.0, 4.68148, 8.0, 8.0, 8.0]
FACTORS = [1.0, 1.0, *[1e30] * 6]


def read(
    folder: Path,
    *,
    factors: list[float] | None = FACTORS,
    long_factors: list[float] | None = None,
    with_values: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> ModelSpec:
    """changes: of keys, with two underscores for a dot. long_factors: `factors` are the short ones beside them."""
    writer = GGUFWriter(folder / "model.gguf", "gemma4")
    keys = KEYS | {key.replace("__", "."): value for key, value in changes.items()}
    add_keys(writer, {f"gemma4.{key}": value for key, value in keys.items() if value is not None})
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    short = "rope_freqs" if long_factors is None else "rope_factors_short"
    for name, values in ((short, factors), ("rope_factors_long", long_factors)):
        if values is not None:
            writer.add_tensor(f"{name}.weight", np.array(values, np.float32))
    for layer in with_values:
        writer.add_tensor(f"blk.{layer}.attn_v.weight", np.zeros((16, 32), np.float32))
    finish(writer)
    return model_of(config_json(read_parts([folder / "model.gguf"])), folder / "model.gguf")


def test_layers_have_heads_of_their_own(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert model.kv_shapes == ((2, 8), (1, 16))
    assert [(rope.type, rope.theta, rope.rotary_dim, rope.num_pairs) for rope in model.ropes] == [
        ("default", 1e4, 8, 0),
        ("proportional", 1e6, 16, 2),
    ]
    assert model.layer_inputs is None


def test_values_are_keys_where_there_is_no_matrix_of_them(tmp_path: Path) -> None:
    for with_values, expected in (((0, 1), [False, False]), ((0,), [False, True])):
        model = read(tmp_path, with_values=with_values)
        assert [layer.attention is not None and layer.attention.values_are_keys for layer in model.layers] == expected


def test_all_pairs_turn_where_the_file_does_not_say_it(tmp_path: Path) -> None:
    assert read(tmp_path, factors=[1.0] * 8).ropes[1].num_pairs == 8
    assert read(tmp_path, factors=None).ropes[1].num_pairs == 8


def test_matrices_that_no_layer_multiplies_by_are_left_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path, "Gemma4ForCausalLM", **SMALL | SHARED)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    to_gguf(tmp_path, tmp_path / "model.gguf", "gemma4", "Q8_0")
    folder = gguf_folder(tmp_path / "model.gguf")
    found = [weight.key for file in find_weights(folder, read_model(folder)) for weight in file.weights]
    assert sorted(found) == sorted(model_weights(read_model(folder)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention__sliding_window_pattern": None}, "key gemma4.attention.sliding_window_pattern is missing, or no"),
        ({"attention__head_count_kv": [2]}, "key gemma4.attention.head_count_kv is not a positive integer for each of"),
        ({"attention__head_count_kv": [2, 0]}, "key gemma4.attention.head_count_kv is not a positive integer for each"),
        ({"attention__head_count": [4, 2]}, "key gemma4.attention.head_count differs by layer"),
        ({"context_length": [64, 32]}, "key gemma4.context_length differs by layer"),
        (
            {"attention__value_length_swa": 4},
            "key gemma4.attention.value_length_swa is 4, and gemma4.attention.key_length_swa is 8; take another file",
        ),
        (
            {"rope__dimension_count_swa": 4},
            "key gemma4.rope.dimension_count_swa is 4, and gemma4.attention.key_length_swa is 8; take another file",
        ),
        (
            {"rope__dimension_count": 8, "factors": [1.0, 1.0, 1e30, 1e30]},
            "key gemma4.rope.dimension_count is 8, and gemma4.attention.key_length is 16; take another file of",
        ),
        ({"feed_forward_length": [48, 64]}, "key gemma4.feed_forward_length differs by layer in a way that"),
        ({"attention__shared_kv_layers": 1}, "num_kv_shared_layers 1 leaves no layer of full_attention before layer 1"),
        ({"attention__shared_kv_layers": 2}, "key gemma4.attention.shared_kv_layers is 2, it must be from 0 to 1"),
        ({"attention__shared_kv_layers": -1 << 40}, "key gemma4.attention.shared_kv_layers is -1,099,511,627,776, it"),
        ({"with_values": (1,)}, "only some layers of one kind have a tensor attn_v"),
        ({"factors": None, "rope__scaling__factor": 4.0}, "its rotary embeddings are scaled (linear), and such models"),
        ({"rope__scaling__factor": 4.0}, "key gemma4.rope.scaling.factor is 4.0, and such models are not supported"),
        (
            {"factors": None, "rope__scaling__type": "yarn", "rope__scaling__original_context_length": 32},
            "its rotary embeddings are scaled (yarn), and such models are not supported",
        ),
        ({"long_factors": [2.0] * 8, "factors": [1.0] * 8}, "its rotary embeddings are scaled (longrope), and such"),
        ({"factors": LLAMA3_FACTORS}, "tensor rope_freqs.weight is not of pairs that turn and pairs that do not"),
        ({"factors": [1.0, 2.0, *[1e30] * 6]}, "tensor rope_freqs.weight is not of pairs that turn and pairs that do"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert "\n" not in str(caught.value)
