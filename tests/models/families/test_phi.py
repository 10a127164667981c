"""Phi computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 1.5, 3.0, 7.0],
}

CASES: dict[str, dict[str, Any]] = {
    "phi": {"architecture": "PhiForCausalLM", "head_dim": 16},
    "phi, tied": {"architecture": "PhiForCausalLM", "partial_rotary_factor": 0.25, "tie_word_embeddings": True},
    "phi3": {"architecture": "Phi3ForCausalLM", "sliding_window": 9},
    "phi3, all of it longer than at first": {
        "architecture": "Phi3ForCausalLM",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 2,
        "rope_parameters": LONG,
        "tie_word_embeddings": True,
    },
    "phi3, all of it shorter than at first": {
        "architecture": "Phi3ForCausalLM",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 1024,
        "rope_parameters": LONG,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
