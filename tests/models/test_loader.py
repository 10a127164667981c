from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.errors import CheckpointError
from eventlm.models.loader import load_decoder
from tests.checkpoints import edit_json, make_checkpoint

Edit = Callable[[Path], None]


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_fused_weights_are_the_checkpoint_s(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path)
    attention = decoder.layers[1].self_attn
    for kind, fused in (("weight", attention.qkv_proj.weight), ("bias", attention.qkv_proj.bias)):
        parts = [tensors[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(fused, torch.cat(parts))
    parts = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(decoder.layers[0].mlp.gate_up_proj.weight, torch.cat(parts))
    assert torch.equal(decoder.lm_head, tensors["lm_head.weight"])


def test_shards_and_single_file_load_alike(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "single", family="qwen3", tied=True)
    make_checkpoint(tmp_path / "sharded", family="qwen3", tied=True, max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single = load_decoder(tmp_path / "single").state_dict()
    sharded = load_decoder(tmp_path / "sharded").state_dict()
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_dtype_is_converted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    decoder = load_decoder(tmp_path, dtype="bfloat16")
    assert {weight.dtype for weight in decoder.parameters()} == {torch.bfloat16}
    assert torch.equal(decoder.embed_tokens, embedding.bfloat16())
    assert decoder.lm_head is decoder.embed_tokens
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_a_tied_head_that_is_another_matrix_is_not_left_aside(max_shard_size: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size=max_shard_size)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight.*set tie_word"):
        load_decoder(tmp_path)


def test_a_tied_head_may_be_stored_once_more(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_decoder(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(max_shard_size: str, dtype: str, tmp_path: Path) -> None:
    # `safetensors.torch.save_model` keeps the first of the two names.
    make_checkpoint(tmp_path, tied=True, max_shard_size=max_shard_size)
    wanted = load_decoder(tmp_path, dtype=dtype).state_dict()
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, path, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    decoder = load_decoder(tmp_path, dtype=dtype)
    assert decoder.lm_head is decoder.embed_tokens
    found = decoder.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


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
