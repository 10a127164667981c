"""Mistral computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.models.loader import load_decoder
from tests.models.families.proof import SMALL, make_checkpoint, prove

MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

TEXT = SMALL | {"head_dim": 16}
#: Of a tower that is left aside.
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 16,
    "image_size": 16,
    "patch_size": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 9, "head_dim": 32},
    "mistral without windows": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "ministral": {
        "head_dim": 16,
        "architecture": "MinistralForCausalLM",
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "ministral3": {"architecture": "Ministral3ForCausalLM", "head_dim": 32, "rope_parameters": MINISTRAL3},
    "mixtral": {"architecture": "MixtralForCausalLM", "num_local_experts": 6},
    "mixtral with windows": {
        "architecture": "MixtralForCausalLM",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": 9,
    },
    "ministral3 in a multimodal model": {
        "architecture": "Mistral3ForConditionalGeneration",
        "text_config": TEXT | {"model_type": "ministral3", "rope_parameters": MINISTRAL3},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    },
    "mistral in a multimodal model": {
        "architecture": "Mistral3ForConditionalGeneration",
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])


def test_tensors_of_a_multimodal_model_may_have_later_names(tmp_path: Path) -> None:
    """Those that its parts have in transformers since version 4.52, which saves the earlier ones."""
    make_checkpoint(tmp_path, **SMALL | CASES["ministral3 in a multimodal model"])
    file = tmp_path / "model.safetensors"
    before = load_decoder(tmp_path).weights
    tensors = load_file(file)
    assert {name.split(".")[0] for name in tensors} == {"language_model", "vision_tower", "multi_modal_projector"}
    later = {
        name.removeprefix("language_model.")
        if name.startswith("language_model.lm_head.")
        else f"model.{name.replace('language_model.model.', 'language_model.')}": tensor
        for name, tensor in tensors.items()
    }
    save_file(later, file)
    after = load_decoder(tmp_path).weights
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
