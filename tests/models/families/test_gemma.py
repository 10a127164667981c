"""Gemma computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import SMALL, prove

GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

#: Of a tower that is left aside.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 16,
    "patch_size": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "gemma": {"architecture": "GemmaForCausalLM", "head_dim": 32},
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 32,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 3,
        "rope_parameters": GEMMA3,
        "tie_word_embeddings": False,
    },
    "gemma3 in a multimodal model": {
        "architecture": "Gemma3ForConditionalGeneration",
        "text_config": SMALL | {"sliding_window": 9, "head_dim": 16, "num_hidden_layers": 7},
        "vision_config": VISION,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
