"""OLMo and EXAONE 4 compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

OLMO3 = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "attention_factor": 1.3,
        "beta_fast": 2.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 128,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

CASES: dict[str, dict[str, Any]] = {
    "olmo": {"architecture": "OlmoForCausalLM", "attention_bias": True},
    "olmo2": {"architecture": "Olmo2ForCausalLM"},
    "olmo3": {
        "architecture": "Olmo3ForCausalLM",
        "sliding_window": 9,
        "num_hidden_layers": 4,
        "rope_parameters": OLMO3,
    },
    "olmoe": {"architecture": "OlmoeForCausalLM", "num_experts": 8, "num_experts_per_tok": 3},
    "exaone4": {"architecture": "Exaone4ForCausalLM", "sliding_window": 9, "num_hidden_layers": 4},
    "exaone4 without windows": {
        "architecture": "Exaone4ForCausalLM",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
