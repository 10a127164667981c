from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eventlm.models.config import read_model, rope_bytes
from eventlm.models.rope import RopeTable, angles, compiled_angles, inverse_frequencies, rope_tables
from eventlm.models.spec import RopeSpec
from tests.checkpoints import edit_json, make_checkpoint
from tests.models.test_decoder import ATTENTION, LAYER, MODEL

LLAMA3_FACTORS: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN: dict[str, Any] = {"type": "yarn", "theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def longrope(rotary_dim: int) -> RopeSpec:
    """Trained with contexts of 64, then stretched."""
    pairs = range(rotary_dim // 2)
    return RopeSpec(
        type="longrope",
        rotary_dim=rotary_dim,
        original_max_position_embeddings=64,
        attention_factor=1.19,
        short_factor=tuple(1.0 + 0.01 * pair for pair in pairs),
        long_factor=tuple(1.0 + 2.5 * pair for pair in pairs),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"theta": 10000.0},
        {"theta": 1000000.0},
        {"type": "linear", "theta": 10000.0, "factor": 2.5},
        {
            "type": "llama3",
            "theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "type": "llama3",
            "theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
        YARN,
        YARN | {"theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        YARN | {"beta_fast": 8.0, "beta_slow": 3.0},
        # Both ends of the ramp are the same pair.
        YARN | {"theta": 10000.0, "original_max_position_embeddings": 2},
    ],
    ids=lambda fields: f"{fields.get('type', 'default')}-{fields['theta']:.0f}",
)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (128, 128), (64, 16)])
def test_frequencies_are_transformers(fields: dict[str, Any], head_dim: int, rotary_dim: int) -> None:
    rope = RopeSpec(rotary_dim=rotary_dim, **fields)
    expected, factor = transformers_frequencies(rope, head_dim)
    torch.testing.assert_close(inverse_frequencies(rope, 512), expected, rtol=1e-6, atol=0)
    assert factor == 1.0 or rope.type == "yarn"


def transformers_frequencies(rope: RopeSpec, head_dim: int, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """Angles per position, and what cosines and sines are multiplied by."""
    if rope.type == "default":
        whole = RopeSpec(type="linear", theta=rope.theta, factor=1.0, rotary_dim=rope.rotary_dim)
        return transformers_frequencies(whole, head_dim)
    parameters = {name: getattr(rope, name) for name in rope.__struct_fields__} | {
        "rope_type": rope.type,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.rotary_dim / head_dim,
    }
    for name in ("type", "theta", "rotary_dim", "is_interleaved"):
        del parameters[name]
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.type](config, seq_len=seq_len)
    return frequencies, factor


@pytest.mark.parametrize(("share", "num_pairs"), [(0.25, 8), (0.3, 9), (1.0, 32)])
def test_proportional_turns_only_the_first_pairs(share: float, num_pairs: int) -> None:
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0, "partial_rotary_factor": share}
    config = LlamaConfig(head_dim=64, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["proportional"](config)
    rope = RopeSpec(type="proportional", theta=1e6, factor=2.0, rotary_dim=64, num_pairs=num_pairs)
    found = inverse_frequencies(rope, 512)
    torch.testing.assert_close(found, expected[:num_pairs], rtol=1e-6, atol=0)
    assert factor == 1.0
    assert not expected[num_pairs:].any()


@pytest.mark.parametrize(("max_positions", "is_long"), [(63, False), (64, False), (65, True)])
def test_longrope_takes_the_factors_for_the_longest_context(max_positions: int, is_long: bool) -> None:
    rope = longrope(48)
    expected, factor = transformers_frequencies(rope, 64, seq_len=max_positions)
    found = inverse_frequencies(rope, max_positions)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == rope.attention_factor
    assert torch.equal(found, inverse_frequencies(rope, 1000)) == is_long
    cos, sin = angles(rope, max_positions)
    assert cos.shape == sin.shape == (max_positions, 24)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full(cos.shape, 1.19**2))


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
    (rope,) = read_model(tmp_path).ropes
    torch.testing.assert_close(inverse_frequencies(rope, 512), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_are_transformers(dtype: torch.dtype) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    theirs = LlamaConfig(head_dim=32, rope_parameters=parameters)
    tables = angles(RopeSpec(theta=500000.0, rotary_dim=32), 300, dtype=dtype)
    expected = LlamaRotaryEmbedding(theirs)(torch.empty(1, dtype=dtype), torch.arange(300)[None])
    for ours, whole in zip(tables, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1), whole[0], rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_a_table_has_both_elements_of_each_pair(is_interleaved: bool) -> None:
    rope = RopeSpec(rotary_dim=8, is_interleaved=is_interleaved)
    positions = torch.tensor([3, 0, 19])
    rotation = RopeTable(rope, 20, dtype=torch.float32, device=torch.device("cpu")).at(positions)
    cos, sin = (table[positions] for table in angles(rope, 20))
    first, second = (slice(0, 8, 2), slice(1, 8, 2)) if is_interleaved else (slice(4), slice(4, 8))
    assert rotation.is_interleaved == is_interleaved
    assert rotation.cos.shape == rotation.sin.shape == (3, 1, 8)
    assert torch.equal(rotation.cos[:, 0, first], cos)
    assert torch.equal(rotation.cos[:, 0, second], cos)
    assert torch.equal(rotation.sin[:, 0, first], -sin)
    assert torch.equal(rotation.sin[:, 0, second], sin)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_pairs_that_do_not_turn_are_in_no_table(is_interleaved: bool) -> None:
    rope = RopeSpec(type="proportional", rotary_dim=8, num_pairs=1, is_interleaved=is_interleaved)
    assert [table.shape for table in angles(rope, 20)] == [(20, 1), (20, 1)]
    whole = structs.replace(rope, type="default")
    positions = torch.tensor([3, 0, 19])
    found, expected = (
        RopeTable(each, 20, dtype=torch.float32, device=torch.device("cpu")).at(positions) for each in (rope, whole)
    )
    turned = [0, 1] if is_interleaved else [0, 4]
    still = [number for number in range(8) if number not in turned]
    assert found.cos.shape == expected.cos.shape
    for ours, theirs, one in ((found.cos, expected.cos, 1.0), (found.sin, expected.sin, 0.0)):
        assert torch.equal(ours[..., turned], theirs[..., turned])
        assert torch.equal(ours[..., still], torch.full_like(ours[..., still], one))


def test_tables_take_what_is_counted() -> None:
    ropes = [
        RopeSpec(rotary_dim=8),
        RopeSpec(rotary_dim=6, is_interleaved=True),
        RopeSpec(type="proportional", rotary_dim=8, num_pairs=1),
    ]
    attentions = [structs.replace(ATTENTION, rope=rope) for rope in [*ropes, None, ropes[0]]]
    layers = tuple(structs.replace(LAYER, attention=attention) for attention in attentions)
    model = structs.replace(MODEL, layers=layers)
    compiled = [table for rope in ropes for table in compiled_angles(rope, 20)]
    assert sum(table.nbytes for table in compiled) == 20 * rope_bytes(model, "bfloat16")
    on_gpu = [table for rope in ropes for table in angles(rope, 20, dtype=torch.bfloat16)]
    assert sum(table.nbytes for table in on_gpu) == 20 * rope_bytes(model, "bfloat16", is_on_gpu=True)


def test_there_is_a_table_for_each_rope_of_a_model(tmp_path: Path) -> None:
    model = read_model(make_checkpoint(tmp_path, rope="linear"))
    (table,) = rope_tables(model, 20, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(table.at(torch.arange(20)).cos[:, 0, :8], angles(model.ropes[0], 20)[0])
