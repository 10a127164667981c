from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from eventlm.models.facts import ModelFacts, read_facts
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.served import read_served
from eventlm.models.transformers_model import AttentionCall, TransformersModel
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models import tiny_gguf


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_of_a_checkpoint(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family=family, dtype="bfloat16", tied=True)  # type: ignore[arg-type]
    facts = read_facts(folder, read_served(folder, "eventlm"))
    [path] = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert facts == ModelFacts(
        embedding_size=64,
        family=family,
        file_format="safetensors",
        weights="bfloat16",
        num_layers=2,
        num_parameters=stored,
        num_bytes=path.stat().st_size,
        context_length=512,
    )
    assert facts.num_parameters > VOCAB_SIZE * facts.embedding_size


def test_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(path)
    folder = gguf_folder(path)
    facts = read_facts(folder, read_served(folder, "auto"))
    assert (facts.family, facts.file_format, facts.num_bytes) == ("llama", "gguf", path.stat().st_size)
    assert facts.weights == "Q4_1"


def test_of_a_model_that_transformers_computes(tmp_path: Path) -> None:
    theirs = TransformersModel(
        architecture="OtherMoeForCausalLM",
        vocab_size=100,
        hidden_size=32,
        max_position_embeddings=256,
        dtype="float32",
        num_weights=1000,
        body="model",
        layers=(AttentionCall(num_heads=4, num_kv_heads=2, key_size=24, value_size=16),),
    )
    facts = read_facts(make_checkpoint(tmp_path), theirs)
    assert (facts.family, facts.num_parameters, facts.embedding_size) == ("othermoe", 1000, 32)
