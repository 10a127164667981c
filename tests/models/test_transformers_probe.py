"""What transformers makes of configs, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.transformers_probe import probe_model
from tests.checkpoints import edit_json
from tests.models.decoders import write_config


def shapes(folder: Path, model_type: str, **fields: Any) -> list[tuple[int, int, int, int]]:
    write_config(folder, model_type, **fields)
    return [(each.num_kv_heads, each.key_size, each.value_size, each.window) for each in probe_model(folder).layers]


def test_a_model_as_it_is_made(tmp_path: Path) -> None:
    write_config(tmp_path, "olmo2")
    model = probe_model(tmp_path)
    assert (model.architecture, model.body, len(model.layers)) == ("Olmo2ForCausalLM", "model", 4)
    assert (model.vocab_size, model.hidden_size, model.max_position_embeddings) == (160, 64, 256)
    # Of each layer: four matrices of attention, three of neurons, and norms; embedding and output matrix.
    attention, neurons, norms = 64 * (64 + 32 + 32 + 64), 3 * 64 * 96, 64 + 32 + 64 + 64
    assert model.num_weights == 4 * (attention + neurons + norms) + 2 * 160 * 64 + 64


def test_heads_and_windows(tmp_path: Path) -> None:
    """Windows come from the masks that a model makes."""
    assert shapes(tmp_path, "llama") == [(2, 16, 16, 0)] * 4
    assert shapes(tmp_path, "cohere2") == [(2, 16, 16, 9)] * 3 + [(2, 16, 16, 0)]
    # No window is cut off by as long a context.
    assert shapes(tmp_path, "mistral", sliding_window=300) == [(2, 16, 16, 0)] * 4
    assert shapes(tmp_path, "gpt2") == [(4, 16, 16, 0)] * 4
    # Two calls in each layer.
    assert len(shapes(tmp_path, "diffllama")) == 8


def test_latent_attention_has_its_keys_and_values_expanded(tmp_path: Path) -> None:
    assert shapes(tmp_path, "deepseek_v3") == [(4, 24, 12, 0)] * 4
    (layer, *_) = probe_model(tmp_path).layers
    assert layer.kv_shape == (4, 24)
    # Layers of two kinds.
    assert set(shapes(tmp_path, "mimo_v2_flash")) == {(2, 16, 12, 0), (4, 16, 12, 9)}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "keep a state"),
    ("qwen3_5_text", {}, "keep a state"),
    ("rwkv", {}, "keep a state"),
    ("deepseek_v32", {}, "sparse"),
    ("deepseek_v4", {}, "keep a state"),
    ("bart", {}, "an encoder with a decoder"),
    ("stablelm", {}, "does not go through transformers' AttentionInterface"),
    ("falcon", {}, "does not go through transformers' AttentionInterface"),
    ("bert", {"is_decoder": False}, "neither causal nor in a window"),
    ("llama4_text", {}, "neither causal nor in a window"),
    ("doge", {}, "masks of its own"),
    ("roberta", {}, "counts positions in a way of its own"),
    ("bloom", {}, "max_position_embeddings"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "depends on the other sequences",
    ),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized"),
]


@pytest.mark.parametrize(("model_type", "fields", "reason"), REFUSED)
def test_what_is_refused(tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str) -> None:
    write_config(tmp_path, model_type, **fields)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/config.json: transformers .*{reason}") as refusal:
        probe_model(tmp_path)
    assert "\n" not in str(refusal.value)


def test_what_transformers_says_of_a_config_is_told_to_its_end(tmp_path: Path) -> None:
    write_config(tmp_path, "llama")
    edit_json(tmp_path / "config.json", layer_types=["sideways"] * 4)
    with pytest.raises(
        CheckpointError, match=r"it cannot read the config: .*`layer_types` entries must be in \('full_"
    ):
        probe_model(tmp_path)


def test_other_architectures_of_a_kind_and_other_code_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "llama")
    edit_json(tmp_path / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(CheckpointError, match="LlamaForSequenceClassification here: it is no causal language model"):
        probe_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "model.Own"})
    with pytest.raises(CheckpointError, match="code of its own"):
        probe_model(tmp_path)
    edit_json(tmp_path / "config.json", model_type="t5")
    with pytest.raises(CheckpointError, match="encoder with a decoder"):
        probe_model(tmp_path)
