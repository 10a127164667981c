"""The runner against transformers on the same random-weight checkpoints, in float32, over all kinds of schedules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.errors import CheckpointError
from eventlm.sampling_params import SamplingParams
from eventlm.worker import op_timer
from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.forward import Forward, make_forward
from eventlm.worker.page_toucher import PageToucher
from eventlm.worker.sequence_table import DesyncError
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import Pair, Schedule, make_pair, make_runner

MODELS: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-mqa-tied-linear-old": {
        "num_kv_heads": 1,
        "tied": True,
        "rope": "linear",
        "old_rope_spelling": True,
    },
    "llama-mha-llama3": {"num_kv_heads": 4, "rope": "llama3"},
    "llama-bias-llama3-old-sharded": {
        "bias": True,
        "rope": "llama3",
        "old_rope_spelling": True,
        "max_shard_size": "100KB",
    },
    "qwen3-gqa-tied": {"family": "qwen3", "tied": True, "head_dim": 32},
    "qwen3-mqa-llama3": {"family": "qwen3", "num_kv_heads": 1, "rope": "llama3"},
    "qwen3-mha-bias-linear": {"family": "qwen3", "num_kv_heads": 4, "bias": True, "rope": "linear"},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **MODELS[request.param])
    return make_pair(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One checkpoint for what does not depend on the architecture."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return make_pair(folder)


@pytest.fixture
def plain_schedule(plain: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    schedule = Schedule(plain.runner, monkeypatch)
    yield schedule
    schedule.forget_all()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(5, VOCAB_SIZE) for _ in range(length)]


def blocks_of(rng_seed: int, count: int, first: int = 0, last: int = 256) -> list[int]:
    """Distinct block numbers in no order."""
    return random.Random(rng_seed).sample(range(first, last), count)


@pytest.mark.parametrize("length", [1, 4, 37, 130])
def test_whole_prefill_and_decode(pair: Pair, schedule: Schedule, length: int) -> None:
    prompt = prompt_of(length)
    schedule.step(new=[new_sequence(1, prompt)], chunks=[(1, 0, 0, length, 1)], blocks=[(0, 0, blocks_of(length, 40))])
    schedule.decode({(1, 0): prompt}, 12)
    schedule.check(pair.model, {(1, 0): prompt})


@pytest.mark.parametrize("sizes", [(1, 1, 1, 58), (7, 11, 3, 40), (30, 31)])
def test_chunks_of_odd_sizes(pair: Pair, schedule: Schedule, sizes: tuple[int, ...]) -> None:
    prompt = prompt_of(sum(sizes))
    start = 0
    for number, size in enumerate(sizes):
        schedule.step(
            new=[new_sequence(1, prompt)] if number == 0 else [],
            chunks=[(1, 0, start, size, int(start + size == len(prompt)))],
            blocks=[(0, 0, blocks_of(3, 20))] if number == 0 else [],
        )
        start += size
    schedule.decode({(1, 0): prompt}, 4)
    schedule.check(pair.model, {(1, 0): prompt})


def test_prefix_cache_hit(pair: Pair, schedule: Schedule) -> None:
    first = prompt_of(41)
    second = [*first[:24], *prompt_of(13, seed=7)]
    numbers = blocks_of(5, 40)
    schedule.step(new=[new_sequence(1, first)], chunks=[(1, 0, 0, 41, 1)], blocks=[(0, 0, numbers[:15])])
    schedule.decode({(1, 0): first}, 3)
    shared = numbers[:6] + numbers[20:30]
    schedule.step(
        new=[new_sequence(2, second)],
        decodes=[(1, 0, 45, 0)],
        chunks=[(2, 0, 24, 13, 1)],
        blocks=[(1, 0, shared)],
    )
    prompts = {(1, 0): first, (2, 0): second}
    schedule.decode(prompts, 3)
    schedule.check(pair.model, prompts)


def test_prefix_cache_hit_in_the_same_step(pair: Pair, schedule: Schedule) -> None:
    first = prompt_of(40)
    prompts = {(1, index): first for index in range(3)} | {(2, 0): [*first[:32], 9, 8, 7]}
    numbers = blocks_of(6, 90)
    schedule.step(
        new=[new_sequence(request, ids, index=index) for (request, index), ids in prompts.items()],
        # The rows that hit come first and last: the order of rows must not matter.
        chunks=[(2, 0, 32, 3, 1), (1, 1, 36, 4, 1), (1, 0, 0, 40, 1), (1, 2, 36, 4, 1)],
        blocks=[
            (0, 0, numbers[:8] + numbers[20:30]),
            (1, 0, numbers[:9] + numbers[30:40]),
            (2, 0, numbers[:9] + numbers[40:50]),
            (3, 0, numbers[:9] + numbers[50:60]),
        ],
    )
    schedule.decode(prompts, 5)
    schedule.check(pair.model, prompts)
    assert schedule.outputs[1, 0] == schedule.outputs[1, 1] == schedule.outputs[1, 2]


def test_after_preemption(pair: Pair, schedule: Schedule) -> None:
    prompts = {(1, 0): prompt_of(19), (2, 0): prompt_of(33)}
    schedule.step(
        new=[new_sequence(1, prompts[1, 0]), new_sequence(2, prompts[2, 0])],
        chunks=[(1, 0, 0, 19, 1), (2, 0, 0, 33, 1)],
        blocks=[(0, 0, blocks_of(1, 20, 0, 100)), (1, 0, blocks_of(2, 20, 100, 200))],
    )
    schedule.decode(prompts, 4)
    # Sequence 1 is preempted, its blocks go to sequence 3, and it comes back in other blocks.
    prompts[3, 0] = prompt_of(50)
    schedule.step(
        decodes=[(2, 0, 38, 0)],
        new=[new_sequence(3, prompts[3, 0])],
        chunks=[(3, 0, 0, 50, 1)],
        blocks=[(1, 0, blocks_of(1, 20, 0, 100))],
        forget=[(1, 0)],
    )
    history = prompts[1, 0] + schedule.outputs[1, 0]
    schedule.step(
        decodes=[(2, 0, 39, 0)],
        new=[new_sequence(1, history, num_prompt_tokens=19)],
        chunks=[(1, 0, 0, 11, 0)],
        blocks=[(1, 0, blocks_of(4, 20, 200, 256))],
    )
    schedule.step(chunks=[(1, 0, 11, len(history) - 11, 1)])
    schedule.decode(prompts, 4)
    schedule.check(pair.model, prompts)


def test_batches_of_mixed_length(pair: Pair, schedule: Schedule) -> None:
    lengths = [1, 2, 3, 5, 17, 18, 64, 90, 33]
    prompts = {(number, 0): prompt_of(length, seed=number) for number, length in enumerate(lengths)}
    numbers = blocks_of(9, 256)
    late = prompts.pop((8, 0))
    schedule.step(
        new=[new_sequence(request, ids) for (request, _), ids in prompts.items()],
        chunks=[(request, 0, 0, len(ids), 1) for (request, _), ids in prompts.items()],
        blocks=[(row, 0, numbers[row * 28 : row * 28 + 28]) for row in range(len(prompts))],
    )
    schedule.decode(prompts, 2)
    for start, size, samples in ((0, 9, 0), (9, 20, 0), (29, 4, 1)):
        rows = [(*key, len(prompt) + len(schedule.outputs[key]), 0) for key, prompt in prompts.items()]
        schedule.step(
            new=[new_sequence(8, late)] if start == 0 else [],
            decodes=rows,
            chunks=[(8, 0, start, size, samples)],
            blocks=[(8, 0, numbers[224:])] if start == 0 else [],
        )
    prompts[8, 0] = late
    schedule.decode(prompts, 5)
    schedule.check(pair.model, prompts)


def test_what_overflowed_in_a_block_s_earlier_owner_is_not_read(plain: Pair, plain_schedule: Schedule) -> None:
    plain.runner.cache.kv.fill_(torch.nan)
    lengths = [1, 3, 4, 7, 18, 30]
    prompts = {(number, 0): prompt_of(length, seed=number) for number, length in enumerate(lengths)}
    numbers = blocks_of(13, 240)
    late = prompts.pop((5, 0))
    plain_schedule.step(
        new=[new_sequence(request, ids) for (request, _), ids in prompts.items()],
        chunks=[(request, 0, 0, len(ids), 1) for (request, _), ids in prompts.items()],
        blocks=[(row, 0, numbers[row * 20 : row * 20 + 20]) for row in range(len(prompts))],
    )
    for start, size, samples in ((0, 7, 0), (7, 4, 0), (11, 2, 0), (13, 17, 1)):
        plain_schedule.step(
            new=[new_sequence(5, late)] if start == 0 else [],
            decodes=[(*key, len(prompt) + len(plain_schedule.outputs[key]), 0) for key, prompt in prompts.items()],
            chunks=[(5, 0, start, size, samples)],
            blocks=[(5, 0, numbers[200:])] if start == 0 else [],
        )
    prompts[5, 0] = late
    plain_schedule.decode(prompts, 9)
    plain_schedule.check(plain.model, prompts)
    plain.runner.cache.kv.zero_()


def test_two_launches_deep(pair: Pair, schedule: Schedule) -> None:
    prompts = {(1, 0): prompt_of(10), (2, 0): prompt_of(23)}
    numbers = blocks_of(11, 40)
    schedule.step(
        new=[new_sequence(request, ids) for (request, _), ids in prompts.items()],
        chunks=[(1, 0, 0, 10, 1), (2, 0, 0, 23, 1)],
        blocks=[(0, 0, numbers[:3]), (1, 0, numbers[10:16])],
    )
    schedule.step(decodes=[(1, 0, 10, 1), (2, 0, 23, 1)])
    # Blocks grow on demand while a step is under way.
    schedule.step(decodes=[(1, 0, 10, 2), (2, 0, 24, 1)], blocks=[(0, 3, numbers[3:8]), (1, 6, numbers[16:24])])
    schedule.decode(prompts, 8, in_flight=2)
    schedule.check(pair.model, prompts)


def test_a_sampled_sequence_does_not_depend_on_its_neighbours(plain: Pair, plain_schedule: Schedule) -> None:
    schedule = plain_schedule
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 5, ignore_eos=True)
    prompt = prompt_of(12)
    schedule.step(
        new=[new_sequence(1, prompt, params=params), new_sequence(1, prompt, index=1, params=params)],
        chunks=[(1, 0, 0, 12, 1), (1, 1, 0, 12, 1)],
        blocks=[(0, 0, list(range(20))), (1, 0, list(range(20, 40)))],
    )
    schedule.decode({(1, 0): prompt, (1, 1): prompt}, 9)
    assert schedule.outputs[1, 0] != schedule.outputs[1, 1]
    # Alone, preempted after 5 tokens.
    kept = schedule.outputs[1, 0]
    schedule.step(
        forget=[(1, 0), (1, 1)],
        new=[new_sequence(1, prompt + kept[:5], num_prompt_tokens=12, params=params)],
        chunks=[(1, 0, 0, 17, 1)],
        blocks=[(0, 0, list(range(60, 80)))],
    )
    for length in range(18, 22):
        schedule.step(decodes=[(1, 0, length, 0)])
    assert schedule.outputs[1, 0][10:] == kept[5:10]


def test_ends_are_seen_and_rows_go_on(plain: Pair, plain_schedule: Schedule) -> None:
    schedule = plain_schedule
    prompt = prompt_of(9)
    schedule.step(new=[new_sequence(1, prompt)], chunks=[(1, 0, 0, 9, 1)], blocks=[(0, 0, list(range(10)))])
    schedule.decode({(1, 0): prompt}, 3)
    assert schedule.ends == {}
    tokens = schedule.outputs[1, 0]
    for request, params, ends in (
        (2, {"eos_token_ids": (tokens[1],)}, "eos"),
        (3, {"stop_token_ids": (tokens[1],)}, "stop_token"),
        (4, {"eos_token_ids": (tokens[1],), "ignore_eos": True}, None),
    ):
        schedule.step(
            new=[new_sequence(request, prompt, params=SamplingParams(temperature=0.0, **params))],
            chunks=[(request, 0, 0, 9, 1)],
            blocks=[(0, 0, list(range(10)))],
        )
        schedule.decode({(request, 0): prompt}, 3)
        assert schedule.outputs[request, 0] == tokens
        assert schedule.ends.get((request, 0), [None])[0] == ends


def test_a_desync_computes_nothing(plain: Pair, plain_schedule: Schedule) -> None:
    plain_schedule.step(
        new=[new_sequence(1, prompt_of(9))],
        chunks=[(1, 0, 0, 9, 1)],
        blocks=[(0, 0, list(range(10)))],
    )
    before = plain.runner.cache.kv.clone()
    with pytest.raises(DesyncError, match=r"1/0.*11 tokens confirmed"):
        plain_schedule.step(decodes=[(1, 0, 11, 0)])
    assert torch.equal(before, plain.runner.cache.kv)


def test_operations_are_timed_without_gaps_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = itertools.count()
    monkeypatch.setattr(op_timer.time, "perf_counter_ns", lambda: next(times_ns))
    runner = make_runner(make_checkpoint(tmp_path, num_layers=3), profile_ops=True)
    step = launched(0, chunks=[(1, 0, 0, 9, 1)], blocks=[(0, 0, [0, 1, 2])])
    ops = runner.execute(step, payload(new_sequence(1, prompt_of(9)))).ops
    once = ("prepare", "embed", "lm_head", "sample", "extras", "record")
    per_layer = ("qkv_proj", "rotary", "attention", "o_proj", "gate_up_proj", "down_proj")
    assert ops == dict.fromkeys(once, 1) | dict.fromkeys(per_layer, 3) | {"norm": 6}
    assert sum(ops.values()) == next(times_ns) - 1


def test_operations_are_not_timed_unasked(plain: Pair) -> None:
    done = plain.runner.execute(
        launched(0, chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [0])]), payload(new_sequence(1, [5, 6]))
    )
    plain.runner.execute(launched(1, forget=[(1, 0)]), payload())
    assert done.ops == {}


def test_dtype_auto_is_the_checkpoint_s(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype="bfloat16")
    runner = make_runner(tmp_path, dtype="auto")
    host = runner.host_info()
    assert host["dtype"] == "bfloat16"
    assert host["threads"] == 1
    assert runner.cache.kv.dtype == torch.bfloat16


def test_a_cache_that_does_not_fit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(CacheMemoryError, match="1000000000000 blocks"):
        make_runner(tmp_path, num_blocks=10**12)


def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_runner(tmp_path)


def test_the_first_pages_are_made_beside_the_weights_and_are_there_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def make(*arguments: Any, **others: Any) -> Forward:
        order.append("weights")
        return make_forward(*arguments, **others)

    monkeypatch.setattr("eventlm.worker.model_runner.make_forward", make)
    monkeypatch.setattr(PageToucher, "begin", lambda _: order.append("begin"))
    monkeypatch.setattr(PageToucher, "wait", lambda _: order.append("wait"))
    make_runner(make_checkpoint(tmp_path))
    assert order == ["begin", "weights", "wait"]
