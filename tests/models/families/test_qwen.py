"""Qwen computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2 with windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "attention_bias": True},
    "qwen2 moe": {
        "architecture": "Qwen2MoeForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [0],
    },
    "qwen3 moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "qwen3 moe, windows": {
        "architecture": "Qwen3MoeForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 9,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 2,
    },
    "qwen3, yarn": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "rope_parameters": YARN},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
