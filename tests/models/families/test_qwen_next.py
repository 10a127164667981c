"""Qwen3-Next and Qwen 3.5 compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.models.config import read_model
from eventlm.models.weights.find_weights import find_weights
from tests.models.families.proof import SMALL, make_checkpoint, prove

KINDS = ["linear_attention", "full_attention", "linear_attention"]
#: Positions of text are the same in all three axes.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
#: A quarter of a head, 8 elements, is rotated. Two value heads share a key.
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": KINDS,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen 3.5": {"architecture": "Qwen3_5ForCausalLM", **DELTA},
    "qwen 3.5 moe": {"architecture": "Qwen3_5MoeForCausalLM", **DELTA, **EXPERTS},
    "qwen3-next": {"architecture": "Qwen3NextForCausalLM", **DELTA, **EXPERTS, "mlp_only_layers": [1]},
    "qwen 3.5 in a multimodal model": {
        "architecture": "Qwen3_5ForConditionalGeneration",
        "text_config": SMALL | DELTA | {"rope_parameters": ROPE, "num_hidden_layers": 2, "layer_types": KINDS[:2]},
        "vision_config": VISION,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])


def test_layers_that_predict_several_tokens_stay_in_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **SMALL | CASES["qwen 3.5"])
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(64, 128)}, file)
    [found] = find_weights(tmp_path, read_model(tmp_path))
    assert not [weight.name for weight in found.weights if weight.name.startswith("mtp")]
