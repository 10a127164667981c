"""gpt-oss computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt-oss": {
        "architecture": "GptOssForCausalLM",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "rope_parameters": YARN,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
