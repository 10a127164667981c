from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.served import read_served
from eventlm.models.spec import ModelSpec
from eventlm.models.transformers_model import AttentionCall, TransformersModel
from tests.checkpoints import edit_json, make_checkpoint
from tests.models import tiny_gguf

THEIRS = TransformersModel(
    architecture="OtherForCausalLM",
    vocab_size=100,
    hidden_size=64,
    max_position_embeddings=256,
    dtype="",
    num_weights=1000,
    body="model",
    layers=(AttentionCall(num_heads=4, num_kv_heads=2, key_size=24, value_size=16),),
)


def make(folder: Path) -> TransformersModel:
    return THEIRS


def refuse(folder: Path) -> TransformersModel:
    raise CheckpointError(f"{folder / 'config.json'}: transformers cannot")


def never(folder: Path) -> TransformersModel:
    raise AssertionError


def test_who_computes_a_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    for impl in ("auto", "eventlm"):
        assert isinstance(read_served(folder, impl, never), ModelSpec)
    # The dtype is that of the tensors where config.json names none.
    assert read_served(folder, "transformers", make).dtype == "bfloat16"
    for unknown in ({"architectures": ["OtherForCausalLM"]}, {"rope_parameters": {"rope_type": "other"}}):
        edit_json(folder / "config.json", **unknown)
        assert isinstance(read_served(folder, "auto", make), TransformersModel)
        with pytest.raises(CheckpointError, match=r"(other|Other)"):
            read_served(folder, "eventlm", never)


def test_what_neither_can_is_said_in_one_line(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_json(folder / "config.json", architectures=["OtherForCausalLM"])
    with pytest.raises(CheckpointError, match=r"^.*config.json: .*'OtherForCausalLM'.*; transformers cannot$"):
        read_served(folder, "auto", refuse)


def test_what_is_wrong_for_all_is_asked_of_nobody_else(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    edit_json(folder / "config.json", hidden_size="many")
    with pytest.raises(CheckpointError, match="hidden_size"):
        read_served(folder, "auto", never)


def test_gguf_files_are_not_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    tiny_gguf.write_gguf(tmp_path / "model.gguf")
    folder = gguf_folder(tmp_path / "model.gguf")
    assert isinstance(read_served(folder, "auto", never), ModelSpec)
    with pytest.raises(CheckpointError, match="transformers does not compute GGUF files"):
        read_served(folder, "transformers", never)
