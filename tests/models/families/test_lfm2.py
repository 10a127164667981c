"""LFM2 computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

CASES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "architecture": "Lfm2ForCausalLM",
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
        "conv_bias": True,
        "block_multiple_of": 32,
    },
    "lfm2 moe": {
        "architecture": "Lfm2MoeForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 4,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
