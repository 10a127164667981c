"""GGUF files are served by their path, from what is made of their headers once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from eventlm import LLM, SamplingParams
from eventlm.errors import CheckpointError
from eventlm.models.config import model_fingerprint, read_model
from eventlm.models.fetch import gguf_folder as module
from eventlm.models.fetch.default_model import CONVERTED, DEFAULT_MODEL
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.fetch.pull import cached
from eventlm.models.loader import load_decoder
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import packed_types
from eventlm.models.weights.weight_bytes import weight_bytes
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.fetch.test_default_model import PROMPTS
from tests.models.gguf.files import byte_level_keys, to_gguf
from tests.models.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def test_it_is_made_once_and_again_for_a_changed_file(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    read = module.read_parts
    monkeypatch.setattr(module, "read_parts", lambda paths: made.append("read") or read(paths))
    folder = gguf_folder(path)
    assert folder.parent == home / "gguf"
    assert sorted(each.name for each in folder.iterdir()) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "gguf.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert gguf_folder(path) == folder
    assert made == ["read"]
    before, weights = model_fingerprint(folder), find_weights(folder, read_model(folder))
    assert [weights[0].path, sum(len(file.weights) for file in weights)] == [path, 2 + 9 * 2]

    copy = path.with_name("copy.gguf")
    copy.write_bytes(path.read_bytes())
    assert gguf_folder(copy) != folder
    assert model_fingerprint(gguf_folder(copy)) == before

    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="the file was changed since its header was read; start again"):
        find_weights(folder, read_model(folder))
    assert gguf_folder(path) != folder
    assert model_fingerprint(gguf_folder(path)) != before
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: No such file or directory"):
        gguf_folder(path)


def test_parts_are_one_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **SMALL)
    to_gguf(tmp_path / "checkpoint", tmp_path / "whole.gguf", "llama", "F16")
    to_gguf(tmp_path / "checkpoint", tmp_path / "split.gguf", "llama", "F16", num_parts=3)
    names = [f"split-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert [path.name for path in sorted(tmp_path.glob("split*"))] == names
    whole, *parts = [gguf_folder(tmp_path / name) for name in ("whole.gguf", *names)]
    assert len({*parts}) == 1
    assert len(find_weights(parts[0], read_model(parts[0]))) == 3
    found, wanted = (load_decoder(folder).weights for folder in (parts[0], whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_tokens_are_those_of_the_same_weights_in_safetensors(tmp_path: Path) -> None:
    """In torch, which unpacks them to the values that bfloat16 rounds alike."""
    fields = SMALL | {"vocab_size": 259, "head_dim": 32, "num_attention_heads": 2}
    model = make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **fields)
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", "Q4_1")
    kind = GGMLQuantizationType.Q4_1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
    model.save_pretrained(tmp_path / "checkpoint")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = []
    for name in ("model.gguf", "checkpoint"):
        options: dict[str, Any] = {"dtype": "bfloat16", "cpu_kernels": "torch"}
        with LLM(tmp_path / name, tokenizer=gguf_folder(tmp_path / "model.gguf"), **options) as llm:
            prompts: Any = [{"prompt_token_ids": [1, 70, 100, 3]}, {"prompt_token_ids": [9] * 20}]
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]


def test_matrices_that_stay_codes_count_as_such(tmp_path: Path) -> None:
    # Heads fill whole panels.
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **SMALL | {"head_dim": 32})
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", "Q4_1")
    folder = gguf_folder(tmp_path / "model.gguf")
    model = read_model(folder)
    types = packed_types(find_weights(folder, model))
    assert set(types.values()) == {"Q4_1"}
    whole, packed = weight_bytes(model, "bfloat16"), weight_bytes(model, "bfloat16", types=types)
    # 5 bits in place of 16 for all but norms and an embedding that is not packed.
    assert packed < (tmp_path / "model.gguf").stat().st_size
    assert 0.3 < packed / whole < 0.5


def test_the_default_model_in_bfloat16_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("EVENTLM_HOME")
        checkpoint = cached(DEFAULT_MODEL + CONVERTED)
    assert checkpoint is not None, "run `make checkpoints`"
    keys = byte_level_keys(checkpoint, "smollm") | {"bos_token_id": 1, "eos_token_id": 2}
    to_gguf(checkpoint, tmp_path / "model.gguf", "llama", "BF16", tokenizer=keys)
    folder = gguf_folder(tmp_path / "model.gguf")
    assert read_model(folder) == read_model(checkpoint)
    found, wanted = (CheckpointTokenizer(each) for each in (folder, checkpoint))
    for text in (*PROMPTS, Path(__file__).read_text()):
        assert found.encode(text, add_special_tokens=True) == wanted.encode(text, add_special_tokens=True)
    pairs = zip(*(load_decoder(each).weights.items() for each in (folder, checkpoint)), strict=True)
    assert all(key == other and torch.equal(weight, same) for (key, weight), (other, same) in pairs)


def test_a_cache_that_cannot_be_written_is_told(path: Path, home: Path) -> None:
    home.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write to the cache .*; make it writable, or set EVENTLM_HOME"):
        gguf_folder(path)


def test_two_processes_may_make_it_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    files = module._files

    def meanwhile(headers: Any) -> dict[str, bytes]:
        if not made:
            made.append(path)
            made.append(gguf_folder(path))
        return files(headers)

    monkeypatch.setattr(module, "_files", meanwhile)
    assert gguf_folder(path) == made[1]
    assert [each.name for each in made[1].parent.iterdir()] == [made[1].name]
