"""Command R computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

CASES: dict[str, dict[str, Any]] = {
    "cohere": {"architecture": "CohereForCausalLM", "attention_bias": True, "logit_scale": 0.3},
    "cohere2": {"architecture": "Cohere2ForCausalLM", "sliding_window": 9, "num_hidden_layers": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
