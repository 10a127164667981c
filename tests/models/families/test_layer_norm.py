"""StableLM, StarCoder 2 and Nemotron compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

CASES: dict[str, dict[str, Any]] = {
    "stablelm": {"architecture": "StableLmForCausalLM", "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm, parallel": {"architecture": "StableLmForCausalLM", "use_parallel_residual": True},
    "starcoder2": {"architecture": "Starcoder2ForCausalLM", "sliding_window": 9},
    "starcoder2 without biases": {"architecture": "Starcoder2ForCausalLM", "use_bias": False},
    "nemotron": {"architecture": "NemotronForCausalLM", "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
