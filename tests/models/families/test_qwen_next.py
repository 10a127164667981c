"""Qwen3-Next and Qwen 3.5 compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

#: A quarter of a head, 8 elements, is rotated. Two value heads share a key.
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
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
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
