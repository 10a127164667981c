"""Sizing the KV cache and the context that it allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.cli.cache_plan import FAKE_MAX_MODEL_LEN, FAKE_NUM_BLOCKS, memory_bytes, plan_cache
from eventlm.config import Config
from eventlm.config.load import load_config
from eventlm.errors import UsageError

#: 2 (keys, values) x 2 layers x 2 heads x 8 x 4 bytes.
TOKEN_BYTES = 256
BLOCK_BYTES = 16 * TOKEN_BYTES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_with(**overrides: object) -> Config:
    return load_config(None, overrides, environment={})


def test_a_given_number_of_blocks_is_taken(checkpoint: Path) -> None:
    assert plan_cache(config_with(num_blocks=100), checkpoint) == (100, 512, [])


def test_blocks_fill_the_memory_that_is_given(checkpoint: Path) -> None:
    plan = plan_cache(config_with(kv_memory=f"{50 * BLOCK_BYTES}B"), checkpoint)
    assert (plan.num_blocks, plan.max_model_len) == (50, 512)
    assert plan_cache(config_with(kv_memory=f"{50 * BLOCK_BYTES}B", dtype="bfloat16"), checkpoint).num_blocks == 100


def test_auto_is_a_quarter_of_what_is_free_shared_by_the_replicas_and_bounded(checkpoint: Path) -> None:
    free = 4 * 100 * BLOCK_BYTES
    assert plan_cache(config_with(), checkpoint, available_bytes=free).num_blocks == 100
    assert plan_cache(config_with(replicas=2), checkpoint, available_bytes=free).num_blocks == 50
    assert plan_cache(config_with(), checkpoint, available_bytes=1 << 60).num_blocks == (4 << 30) // BLOCK_BYTES
    assert plan_cache(config_with(), checkpoint).num_blocks > 0


def test_the_context_is_cut_to_one_block_less_than_the_pool_with_a_warning(checkpoint: Path) -> None:
    plan = plan_cache(config_with(num_blocks=11), checkpoint)
    assert plan.max_model_len == 160
    assert "cut from 512 to 160 tokens" in plan.warnings[0]
    assert plan_cache(config_with(num_blocks=11, max_model_len=160), checkpoint) == (11, 160, [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_blocks": 11, "max_model_len": 161}, "hold a context of 160 tokens, 161 are needed"),
        ({"num_blocks": 1}, "1 KV blocks of 16 tokens hold a context of 0 tokens, 1 are needed"),
        ({"kv_memory": "1B"}, "0 KV blocks of 16 tokens hold a context of 0 tokens"),
        ({"max_model_len": 513}, "--max-model-len 513 is longer than the 512 tokens that the model was made for"),
    ],
)
def test_a_context_that_cannot_be_had_is_an_error(checkpoint: Path, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_cache(config_with(**overrides), checkpoint)


def test_the_fake_model_has_a_pool_of_its_own() -> None:
    config = config_with(model="fake")
    assert plan_cache(config, None) == (FAKE_NUM_BLOCKS, FAKE_MAX_MODEL_LEN, [])
    assert plan_cache(config_with(model="fake", max_model_len=20_000), None).max_model_len == 20_000


@pytest.mark.parametrize(
    ("size", "expected"),
    [("7B", 7), ("2KB", 2000), ("2KiB", 2048), ("1.5GiB", 3 << 29), ("3TB", 3 * 10**12), ("1TiB", 1 << 40)],
)
def test_sizes_have_decimal_and_binary_units(size: str, expected: int) -> None:
    assert memory_bytes(size) == expected
    assert config_with(kv_memory=size).cache.kv_memory == size
