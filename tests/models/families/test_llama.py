"""Llama and its near relations compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import prove

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 5.0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "smollm3": {"architecture": "SmolLM3ForCausalLM", "num_hidden_layers": 4},
    "smollm3 with windows": {
        "architecture": "SmolLM3ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 9,
        "no_rope_layers": [0, 1],
        "tie_word_embeddings": False,
    },
    "arcee": {"architecture": "ArceeForCausalLM", "attention_bias": True, "mlp_bias": True},
    "seed-oss": {"architecture": "SeedOssForCausalLM", "head_dim": 32, "attention_out_bias": True},
    "helium": {"architecture": "HeliumForCausalLM", "head_dim": 16, "attention_bias": True},
    "ernie": {"architecture": "Ernie4_5ForCausalLM", "head_dim": 32, "use_bias": True},
    "granite": {"architecture": "GraniteForCausalLM", **GRANITE},
    "granite moe": {"architecture": "GraniteMoeForCausalLM", **GRANITE, "num_local_experts": 6},
    "granite moe, shared": {
        "architecture": "GraniteMoeSharedForCausalLM",
        **GRANITE,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "ernie moe": {
        "architecture": "Ernie4_5_MoeForCausalLM",
        "use_bias": True,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
    },
    "ernie moe without shared experts": {
        "architecture": "Ernie4_5_MoeForCausalLM",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 0,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
