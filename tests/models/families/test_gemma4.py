"""Gemma 4 computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.families.proof import SMALL, prove

#: Of full attention the heads are larger, and in one case fewer.
DENSE: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
SHARED: dict[str, Any] = DENSE | {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 170,
    "use_double_wide_mlp": True,
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
#: Of towers that are left aside.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "gemma4": {
        "architecture": "Gemma4ForCausalLM",
        **DENSE,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "gemma4 with shared keys and inputs of layers": {"architecture": "Gemma4ForCausalLM", **SHARED},
    "gemma4 with experts": {"architecture": "Gemma4ForCausalLM", **DENSE, **EXPERTS},
    "gemma4 in a multimodal model": {
        "architecture": "Gemma4ForConditionalGeneration",
        "text_config": SMALL | SHARED,
        "vision_config": VISION,
        "audio_config": AUDIO,
    },
    "gemma4 unified": {"architecture": "Gemma4UnifiedForCausalLM", **DENSE, "attention_k_eq_v": True},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])
