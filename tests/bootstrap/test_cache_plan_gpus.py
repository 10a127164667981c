"""Sizing the KV cache where the model runs on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bootstrap.cache_plan import check_kv_memory, plan_cache
from eventlm.bootstrap.gpus import INTERPRETER, Gpu
from eventlm.errors import UsageError
from eventlm.kernels.gpu.code_types import code_bytes
from eventlm.models.config import read_model
from eventlm.models.program import WeightKey
from eventlm.models.weights.decoder_weights import model_weights
from tests.bootstrap.test_cache_plan import BLOCK_BYTES, POSITION_BYTES, WEIGHT_BYTES, checkpoint, config_with

__all__ = ["checkpoint"]

#: Rotary tables of the whole context, float32.
TABLE_BYTES = 512 * POSITION_BYTES
#: What a worker needs at least: its weights, its tables and one sequence of the shortest context.
LEAST = WEIGHT_BYTES + TABLE_BYTES + 2 * BLOCK_BYTES


def a_gpu(total: int = 1 << 30, free: int | None = None, number: int = 0) -> Gpu:
    return Gpu(number, "NVIDIA A10", total, total if free is None else free, (8, 6))


def test_the_workers_find_out_how_much_there_is_room_for(checkpoint: Path) -> None:
    assert plan_cache(config_with(), checkpoint, [a_gpu()]) == (0, 512, [])
    assert plan_cache(config_with(max_model_len=300), checkpoint, [a_gpu()]) == (0, 300, [])


def test_the_interpreter_has_no_memory_to_measure(checkpoint: Path) -> None:
    gpu = a_gpu()._replace(name=INTERPRETER)
    with pytest.raises(UsageError) as raised:
        plan_cache(config_with(), checkpoint, [gpu])
    for words in ("--device cuda", "TRITON_INTERPRET=1", "--num-blocks", "--kv-memory"):
        assert words in str(raised.value)
    assert plan_cache(config_with(num_blocks=100), checkpoint, [gpu]).num_blocks == 100
    assert plan_cache(config_with(kv_memory=f"{50 * BLOCK_BYTES}B"), checkpoint, [gpu]).num_blocks == 50


def test_what_is_asked_for_is_taken(checkpoint: Path) -> None:
    assert plan_cache(config_with(num_blocks=100), checkpoint, [a_gpu()]) == (100, 512, [])
    plan = plan_cache(config_with(kv_memory=f"{11 * BLOCK_BYTES}B"), checkpoint, [a_gpu()])
    assert plan[:2] == (11, 160)
    assert "cut from 512 to 160 tokens" in plan.warnings[0]
    assert plan.warnings[0].endswith("raise --kv-memory for more")


def test_codes_count_as_what_they_take_on_a_gpu(checkpoint: Path) -> None:
    key = WeightKey("down", 0, "weight")
    num_out, num_in = model_weights(read_model(checkpoint))[key]
    saved = num_out * num_in * 4 - code_bytes("Q4_0", num_out, num_in)
    fits = config_with(gpu_memory_utilization="1.0")
    assert plan_cache(fits, checkpoint, [a_gpu(LEAST - saved)], {key: "Q4_0"}).num_blocks == 0
    with pytest.raises(UsageError, match="take a smaller model"):
        plan_cache(fits, checkpoint, [a_gpu(LEAST - saved - 1)], {key: "Q4_0"})


def test_weights_and_one_sequence_must_fit_into_the_share(checkpoint: Path) -> None:
    half = config_with(gpu_memory_utilization="0.5")
    assert plan_cache(half, checkpoint, [a_gpu(2 * LEAST)]).num_blocks == 0
    with pytest.raises(UsageError) as raised:
        plan_cache(half, checkpoint, [a_gpu(2 * LEAST - 2)])
    assert str(raised.value) == (
        f"{checkpoint}: its weights take {WEIGHT_BYTES:,} bytes, rotary tables 16,384 bytes, the KV cache of one "
        f"sequence 8,192 bytes, and --gpu-memory-utilization 0.5 allows {LEAST - 1:,} bytes of the {2 * LEAST - 2:,} "
        "bytes of GPU 0 (NVIDIA A10); raise it, lower --max-model-len, or take a smaller model"
    )
    with pytest.raises(UsageError, match=r"GPU 0 \(NVIDIA A10\); lower --max-model-len, or take a"):
        plan_cache(half, checkpoint, [a_gpu(LEAST - 1)])
    short = config_with(max_model_len=16, gpu_memory_utilization="0.5")
    assert plan_cache(short, checkpoint, [a_gpu(2 * (LEAST - 496 * POSITION_BYTES))]).num_blocks == 0
    with pytest.raises(
        UsageError, match=r"tables 16,384 bytes, .* sequence 135,168 bytes.*; raise it, lower --max-model-len, or take"
    ):
        plan_cache(config_with(max_model_len=512), checkpoint, [a_gpu(LEAST + 32 * BLOCK_BYTES)])


def test_rotary_tables_have_the_dtype_of_the_weights(checkpoint: Path) -> None:
    config = config_with(dtype="bfloat16", gpu_memory_utilization=1)
    assert plan_cache(config, checkpoint, [a_gpu(LEAST // 2)]).num_blocks == 0
    with pytest.raises(UsageError, match="rotary tables 8,192 bytes"):
        plan_cache(config, checkpoint, [a_gpu(LEAST // 2 - 1)])


def test_what_other_programs_hold_is_counted(checkpoint: Path) -> None:
    with pytest.raises(UsageError) as raised:
        plan_cache(config_with(), checkpoint, [a_gpu(1 << 30, LEAST - 1)])
    found = f"GPU 0 (NVIDIA A10) {LEAST - 1:,} bytes are free; lower --max-model-len, end other programs on it, which"
    assert f"of the 1,024 MiB of {found}" in str(raised.value)
    plan = plan_cache(config_with(), checkpoint, [a_gpu(1 << 30, LEAST)])
    assert plan.num_blocks == 0
    assert plan.warnings == [
        "other programs hold memory of GPU 0 (NVIDIA A10): --gpu-memory-utilization 0.9 allows 921 MiB, and "
        f"{LEAST:,} bytes are free, so the KV cache will be smaller"
    ]


def test_replicas_on_one_gpu_share_it(checkpoint: Path) -> None:
    both = config_with(replicas=2, gpu_memory_utilization=1)
    assert plan_cache(both, checkpoint, [a_gpu(2 * LEAST)]).num_blocks == 0
    with pytest.raises(
        UsageError, match=r"bytes for each of 2 replicas, .* allows .*; lower --replicas, lower --max-model-len, or"
    ):
        plan_cache(both, checkpoint, [a_gpu(2 * LEAST - 1)])
    assert plan_cache(both, checkpoint, [a_gpu(LEAST), a_gpu(LEAST, number=1)]).num_blocks == 0
    with pytest.raises(UsageError, match=r"GPU 1 \("):
        plan_cache(both, checkpoint, [a_gpu(LEAST), a_gpu(LEAST - 1, number=1)])
    # Nobody is on the third.
    assert plan_cache(both, checkpoint, [a_gpu(LEAST), a_gpu(LEAST, number=1), a_gpu(1, number=2)]).num_blocks == 0
    three = config_with(replicas=3, gpu_memory_utilization=1)
    with pytest.raises(UsageError, match=r"for each of 2 replicas, .* GPU 0 \("):
        plan_cache(three, checkpoint, [a_gpu(2 * LEAST - 1), a_gpu(LEAST, number=1)])


def test_a_cache_that_the_gpu_has_no_memory_for_is_an_error(checkpoint: Path) -> None:
    gpu = a_gpu(WEIGHT_BYTES + TABLE_BYTES + 40 * BLOCK_BYTES)
    options = {"gpu_memory_utilization": 1}
    assert plan_cache(config_with(num_blocks=40, **options), checkpoint, [gpu]).num_blocks == 40
    with pytest.raises(UsageError) as raised:
        plan_cache(config_with(num_blocks=41, **options), checkpoint, [gpu])
    assert str(raised.value) == (
        f"--num-blocks 41: a KV cache of {41 * BLOCK_BYTES:,} bytes beside {WEIGHT_BYTES:,} bytes of weights and "
        "16,384 bytes of rotary tables is more than all the memory of GPU 0 (NVIDIA A10), which is "
        f"{gpu.total_bytes:,} bytes; give less, or leave it out for what fits"
    )
    wish = config_with(kv_memory=f"{40 * BLOCK_BYTES}B", replicas=2, **options)
    with pytest.raises(UsageError, match=r"--kv-memory .* for each of 2 replicas is more than all"):
        plan_cache(wish, checkpoint, [gpu._replace(total_bytes=2 * gpu.total_bytes - 1)])


def test_a_cache_that_is_more_than_is_free_is_warned_of(checkpoint: Path) -> None:
    gpu = a_gpu(free=WEIGHT_BYTES + TABLE_BYTES + 40 * BLOCK_BYTES)
    assert plan_cache(config_with(num_blocks=40), checkpoint, [gpu]).warnings == []
    [warning] = plan_cache(config_with(num_blocks=41), checkpoint, [gpu]).warnings
    assert warning.startswith("--num-blocks 41: a KV cache of 167,936 bytes beside ")
    assert warning.endswith(f"is free on GPU 0 (NVIDIA A10), {gpu.free_bytes:,} bytes; its worker may not start")


def test_a_cache_beyond_the_gpu_is_found_before_there_is_a_model() -> None:
    check_kv_memory(config_with(kv_memory="1GiB"), [a_gpu()])
    with pytest.raises(
        UsageError, match=r"--kv-memory 2GiB: a KV cache of 2,048 MiB is more than all the memory of GPU"
    ):
        check_kv_memory(config_with(kv_memory="2GiB"), [a_gpu()])


def test_a_context_longer_than_the_model_s_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--max-model-len 513 is longer than the 512 tokens"):
        plan_cache(config_with(max_model_len=513), checkpoint, [a_gpu()])


def test_a_rank_needs_room_for_its_part_alone(checkpoint: Path) -> None:
    two = [a_gpu(LEAST - 1), a_gpu(LEAST - 1, number=1)]
    split = {"gpu_memory_utilization": 1, "tensor_parallel_size": 2}
    assert plan_cache(config_with(**split), checkpoint, two).num_blocks == 0
    with pytest.raises(UsageError, match=r"GPU 0 \(NVIDIA A10\); lower --max-model-len, or take a smaller model"):
        plan_cache(config_with(gpu_memory_utilization=1), checkpoint, two)
    # Both on one GPU need more than one worker, for each has norms and tables.
    with pytest.raises(UsageError, match=r"GPU 0 \(NVIDIA A10\)"):
        plan_cache(config_with(**split, ranks_per_gpu=2), checkpoint, [a_gpu(LEAST)])
