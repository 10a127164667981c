from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eventlm.models.config import RopeConfig, read_config
from eventlm.models.rope import angles, inverse_frequencies
from tests.checkpoints import edit_json

LLAMA3_FACTORS: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=10000.0),
        RopeConfig(theta=1000000.0),
        RopeConfig(type="linear", theta=10000.0, factor=2.5),
        RopeConfig(
            type="llama3",
            theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        RopeConfig(
            type="llama3",
            theta=10000.0,
            factor=8.0,
            low_freq_factor=2.0,
            high_freq_factor=3.0,
            original_max_position_embeddings=64,
        ),
    ],
    ids=lambda rope: f"{rope.type}-{rope.theta:.0f}",
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_transformers(rope: RopeConfig, head_dim: int) -> None:
    parameters = {
        "rope_type": rope.type,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.allclose(inverse_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "written",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "linear", "factor": 4},
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}, "rope_scaling": {}},
        {"rope_parameters": LLAMA3_FACTORS, "original_max_position_embeddings": 64},
        {"rope_scaling": LLAMA3_FACTORS | {"original_max_position_embeddings": 32}, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3_FACTORS | {"original_max_position_embeddings": 32, "rope_theta": 5e5}},
    ],
)
def test_what_a_config_says_in_two_places_is_read_as_transformers_reads_it(
    written: dict[str, Any], tmp_path: Path
) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", head_dim=32).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **{"rope_parameters": None} | written)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path)).inv_freq
    found = inverse_frequencies(read_config(tmp_path).rope, 32)
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_are_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    theirs = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", head_dim=32, rope_parameters=rope)
    theirs.save_pretrained(tmp_path)
    tables = angles(read_config(tmp_path), 300, dtype=dtype)
    expected = LlamaRotaryEmbedding(theirs)(torch.empty(1, dtype=dtype), torch.arange(300)[None])
    for ours, whole in zip(tables, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1), whole[0], rtol=torch.finfo(dtype).eps, atol=1e-6)
