from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.errors import CheckpointError
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.loader import load_decoder
from eventlm.models.program import WeightKey
from tests.checkpoints import edit_json, make_checkpoint
from tests.models.families.proof import SMALL
from tests.models.families.proof import make_checkpoint as make_random_checkpoint

Edit = Callable[[Path], None]
EMBEDDING, HEAD = WeightKey("embedding", 0, "weight"), WeightKey("lm_head", 0, "weight")


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_fused_weights_are_the_checkpoint_s(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = load_decoder(tmp_path).weights
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(weights[WeightKey("qkv", 1, kind)], torch.cat(parts))
    parts = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(weights[WeightKey("gate_up", 0, "weight")], torch.cat(parts))
    assert torch.equal(weights[HEAD], tensors["lm_head.weight"])


def test_shards_and_single_file_load_alike(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "single", family="qwen3", tied=True)
    make_checkpoint(tmp_path / "sharded", family="qwen3", tied=True, max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single = load_decoder(tmp_path / "single").weights
    sharded = load_decoder(tmp_path / "sharded").weights
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_dtype_is_converted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    decoder = load_decoder(tmp_path, dtype="bfloat16")
    assert {weight.dtype for weight in decoder.weights.values()} == {torch.bfloat16}
    assert torch.equal(decoder.weights[EMBEDDING], embedding.bfloat16())
    assert decoder.is_tied
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_a_head_that_is_another_matrix_is_not_tied(max_shard_size: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size=max_shard_size)
    wanted = load_decoder(tmp_path).weights
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    decoder = load_decoder(tmp_path)
    assert not decoder.is_tied
    assert torch.equal(decoder.weights[HEAD], wanted[HEAD])
    assert torch.equal(decoder.weights[EMBEDDING], wanted[EMBEDDING])


def test_a_tied_head_may_be_stored_once_more(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_decoder(tmp_path).is_tied
    # In another dtype it is another matrix.
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].bfloat16()}))
    assert not load_decoder(tmp_path).is_tied


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(max_shard_size: str, dtype: str, tmp_path: Path) -> None:
    # `safetensors.torch.save_model` keeps the first of the two names.
    make_checkpoint(tmp_path, tied=True, max_shard_size=max_shard_size)
    wanted = load_decoder(tmp_path, dtype=dtype).weights
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    decoder = load_decoder(tmp_path, dtype=dtype)
    assert decoder.is_tied
    found = decoder.weights
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


EXPERTS = {
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen2MoeForCausalLM": {"num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "OlmoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2},
    "GraniteMoeForCausalLM": {"num_local_experts": 3},
    "GraniteMoeSharedForCausalLM": {"num_local_experts": 3, "shared_intermediate_size": 40},
    "Glm4MoeForCausalLM": {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_in_one_tensor_load_as_those_that_have_their_own(architecture: str, tmp_path: Path) -> None:
    """As transformers 5 saves them if it keeps its own names of modules."""
    changes = EXPERTS[architecture]
    if "num_experts_per_tok" not in changes and "moe_k" not in changes:
        changes = changes | {"num_experts_per_tok": 2}
    model = make_random_checkpoint(tmp_path / "1", architecture, **SMALL | changes)
    model.save_pretrained(tmp_path / "2", save_original_format=False)
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("1", "2")]
    assert names[0] != names[1]
    first, second = (load_decoder(tmp_path / folder).weights for folder in ("1", "2"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_experts_are_quantized_like_other_matrices(tmp_path: Path) -> None:
    """Also those that lie transposed."""
    fields = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    make_random_checkpoint(tmp_path, "GptOssForCausalLM", **SMALL | fields)
    floats, decoder = load_decoder(tmp_path).weights, load_decoder(tmp_path, quantization="int8")
    for name in ("gate_up", "down"):
        key = WeightKey(name, 1, "weight", 2)
        values, scales = quantize_rows(floats[key])
        assert torch.equal(decoder.weights[key], values)
        assert torch.equal(decoder.scales[key], scales)
    router = WeightKey("router", 1, "weight")
    assert torch.equal(decoder.weights[router], floats[router])


def drop(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def transpose(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))


def add(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))


def quantize(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"x" * 12
    path.write_bytes(content)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def html(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<!DOCTYPE html><p>Not found</p>" * 50)


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def fewer_layers(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=1)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (drop, ["model.layers.1.mlp.up_proj.weight", "missing"]),
        (transpose, ["model.layers.0.mlp.down_proj.weight", "[160, 64]", "[64, 160]"]),
        (add, ["model.layers.0.self_attn.q_norm.weight", "LlamaForCausalLM"]),
        (quantize, ["model.norm.weight", "I8"]),
        (truncate, ["cut short or damaged: "]),
        (garble_header, ["header"]),
        (empty, ["the file is empty"]),
        (html, ["this is a web page"]),
        (remove, ["neither model.safetensors nor model.safetensors.index.json"]),
        (fewer_layers, ["model.layers.1."]),
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path: Path, edit: Edit, parts: list[str]) -> None:
    make_checkpoint(tmp_path)
    edit(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_decoder(tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_broken_shards_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_decoder(tmp_path)
    shards[1].write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: cut short"):
        load_decoder(tmp_path)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(CheckpointError, match="is in two files"):
        load_decoder(tmp_path)
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": "../../etc/passwd"}}))
    with pytest.raises(CheckpointError, match="lm_head"):
        load_decoder(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        load_decoder(tmp_path)
