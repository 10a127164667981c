"""GLM computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

CASES: dict[str, dict[str, Any]] = {
    "glm": {"architecture": "GlmForCausalLM", "head_dim": 32},
    "glm4": {"architecture": "Glm4ForCausalLM", "head_dim": 32, "attention_bias": False},
    "glm4.5": {
        "architecture": "Glm4MoeForCausalLM",
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "glm4.5 air": {
        "architecture": "Glm4MoeForCausalLM",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": False,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
