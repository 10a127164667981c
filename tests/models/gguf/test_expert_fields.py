"""GGUF files of models with experts: what their metadata say, and their matrices, of which one tensor has many."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import available_builds, packed_bytes
from eventlm.models.config import model_of, read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.gguf.config_json import config_json
from eventlm.models.gguf.header import read_parts
from eventlm.models.loader import load_decoder
from eventlm.models.program import WeightKey
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import packed_types
from eventlm.models.weights.weight_bytes import weight_bytes
from tests.kernels.cpu.decoders import CompiledDecoder, Piece, TorchDecoder, only, random_sequences
from tests.kernels.cpu.test_experts import median_error
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.gguf.files import add_keys, finish, to_gguf

SIZES: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 64,
    "qwen3moe.embedding_length": 32,
    "qwen3moe.feed_forward_length": 48,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-5,
    "qwen3moe.expert_count": 6,
    "qwen3moe.expert_used_count": 2,
}
SHAPES = {
    "token_embd.weight": (16, 32),
    "output_norm.weight": (32,),
    "blk.1.ffn_up_exps.weight": (6, 24, 32),
    "blk.1.ffn_up_shexp.weight": (40, 32),
}


def config_of(
    folder: Path, changes: dict[str, Any], *, architecture: str = "qwen3moe", shapes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Of a file of this architecture with some tensors. changes: of keys, without the architecture before them."""
    metadata = {key.replace("qwen3moe", architecture): value for key, value in SIZES.items()}
    metadata |= {f"{architecture}.{key}": value for key, value in changes.items()}
    metadata["general.architecture"] = architecture
    writer = GGUFWriter(folder / "model.gguf", architecture)
    writer.kv_data[0].clear()
    add_keys(writer, {key: value for key, value in metadata.items() if value is not None})
    for name, shape in (SHAPES | (shapes or {})).items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    finish(writer)
    return config_json(read_parts([folder / "model.gguf"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_count": None}, "key qwen3moe.expert_count is 0 or missing, and the architecture has experts"),
        ({"expert_count": 1 << 63}, "num_experts"),
        ({"expert_count": "six"}, "key qwen3moe.expert_count is a string, it must be an integer"),
        ({"expert_used_count": None}, "key qwen3moe.expert_used_count is missing"),
        ({"expert_used_count": 7}, "7 experts for a token is not supported, of 6"),
        ({"expert_gating_func": 2}, "key qwen3moe.expert_gating_func is 2, and qwen3moe models that have it"),
        ({"expert_weights_scale": 2.5}, "key qwen3moe.expert_weights_scale is 2.5, and such models"),
        ({"expert_group_count": 3}, "key qwen3moe.expert_group_count is 3, and such models"),
        ({"nextn_predict_layers": 1}, "key qwen3moe.nextn_predict_layers is 1, and such models"),
        ({"expert_weights_norm": 1}, "key qwen3moe.expert_weights_norm is an integer, it must be true or false"),
    ],
)
def test_what_cannot_be_run_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_of(config_of(tmp_path, changes), tmp_path / "model.gguf")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")


@pytest.mark.parametrize("count", [-1, 2, 1 << 40])
def test_more_drafting_layers_than_layers_are_told(count: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(tmp_path, {"nextn_predict_layers": count, "expert_gating_func": 2}, architecture="glm4moe")
    assert str(caught.value) == (
        f"{tmp_path / 'model.gguf'}: key glm4moe.nextn_predict_layers is {count:,}, it must be from 0 to 1; take "
        "another file of the model"
    )


def test_experts_of_an_architecture_that_has_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"key qwen3\.expert_count is 6, and qwen3 models have no experts; take"):
        config_of(tmp_path, {}, architecture="qwen3")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (None, "tensor blk.1.ffn_up_exps.weight is missing, and key qwen3moe.expert_count says that there are experts"),
        ((24, 32), "tensor blk.1.ffn_up_exps.weight has 2 dimensions, it must have 3"),
    ],
)
def test_tensors_that_do_not_say_a_size_are_told(shape: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_of(tmp_path, {}, shapes={"blk.1.ffn_up_exps.weight": shape})


def test_what_no_key_says_is_what_llama_cpp_assumes(tmp_path: Path) -> None:
    assert config_of(tmp_path, {})["moe_intermediate_size"] == 24
    for architecture, is_normalized in (("qwen2moe", False), ("qwen3moe", True), ("olmoe", False)):
        assert config_of(tmp_path, {}, architecture=architecture)["norm_topk_prob"] == is_normalized
        assert config_of(tmp_path, {"expert_weights_norm": True}, architecture=architecture)["norm_topk_prob"]
    assert config_of(tmp_path, {}, architecture="qwen2moe")["shared_expert_intermediate_size"] == 40
    drafting = config_of(tmp_path, {"nextn_predict_layers": 1, "expert_gating_func": 2}, architecture="glm4moe")
    assert (drafting["num_hidden_layers"], drafting["num_nextn_predict_layers"]) == (1, 1)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Qwen 2 MoE without a GGUF file."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    fields = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}
    fields |= {"shared_expert_intermediate_size": 96, "tie_word_embeddings": False}
    make_checkpoint(tmp_path / "checkpoint", "Qwen2MoeForCausalLM", **SMALL | fields)
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_codes(checkpoint: Path, kind: str) -> None:
    """They are those of gguf-py, stay what they are, and count so; products are near to those of their values."""
    to_gguf(checkpoint, checkpoint / "model.gguf", "qwen2moe", kind)
    folder = gguf_folder(checkpoint / "model.gguf")
    model, type_ = read_model(folder), GGMLQuantizationType[kind]
    found, exact = (load_decoder(each, dtype="float32").weights for each in (folder, checkpoint))
    for key in (
        WeightKey("gate_up", 1, "weight", 4),
        WeightKey("down", 0, "weight", 2),
        WeightKey("down", 0, "weight"),
    ):
        expected = gguf.dequantize(gguf.quantize(exact[key].numpy(), type_), type_)
        assert torch.equal(found[key], torch.from_numpy(expected)), key
    for name in ("router", "shared_scale"):
        assert torch.equal(found[WeightKey(name, 1, "weight")], exact[WeightKey(name, 1, "weight")])

    types = packed_types(find_weights(folder, model))
    assert set(types.values()) == {kind}
    assert sum(key.expert >= 0 for key in types) == 2 * 3 * 5
    assert not any(key.name in ("router", "shared_scale") for key in types)
    if available_builds():
        of_experts = {key: kind for key in types if key.expert >= 0}
        shapes = model_weights(model)
        saved = weight_bytes(model, "bfloat16") - weight_bytes(model, "bfloat16", types=of_experts)
        assert saved == sum(2 * math.prod(shapes[key]) - packed_bytes(kind, *shapes[key]) for key in of_experts)
    [sequence] = random_sequences(model.vocab_size, [60])
    expected_TV = TorchDecoder(folder, "float32").run(sequence).logits_TV
    for build in native.available_builds():
        decoder = CompiledDecoder(folder, build, num_threads=2)
        steps = [[Piece(0, 0, 40)], [Piece(0, 40, 41)], [Piece(0, 41, 60)]]
        logits_TV = only(decoder.run([sequence], [[3, 0, 2, 1]], steps)).logits_TV
        assert 0.001 < median_error(logits_TV, expected_TV) < 0.05, build
        assert decoder.decoder.weight_bytes["experts"] == sum(
            weight.num_bytes
            for file in find_weights(folder, model)
            for weight in file.weights
            if weight.key.expert >= 0
        )


def test_stacked_tensors_that_are_not_those_of_the_metadata_are_told(checkpoint: Path) -> None:
    path = checkpoint / "model.gguf"
    to_gguf(checkpoint, path, "qwen2moe")
    data = path.read_bytes()
    # The file says that there are six experts; its tensors have five.
    key = b"qwen2moe.expert_count"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + (6).to_bytes(4, "little") + data[at + 4 :])
    folder = gguf_folder(path)
    model = read_model(folder)
    with pytest.raises(CheckpointError) as caught:
        find_weights(folder, model)
    assert str(caught.value) == (
        f"{path}: tensor blk.0.ffn_gate_inp.weight has shape [5, 64], by the metadata it is [6, 64]; "
        "download the file again"
    )
