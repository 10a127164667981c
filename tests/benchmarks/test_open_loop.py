"""Workloads are the same whenever they are drawn, and an engine serves them as they say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.what_if.null import BLOCKS, settings
from benchmarks.what_if.open_loop import BLOCK_SIZE, MAX_MODEL_LEN, MIXES, Prompts, draw_workload, run_workload
from eventlm.bootstrap.composition import compose
from eventlm.config.load import load_config
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.workload.recorded_run import read_run


def test_a_seed_is_a_workload() -> None:
    for mix in MIXES.values():
        workload = draw_workload(mix, rate=20, seconds=5, seed=3)
        assert workload == draw_workload(mix, rate=20, seconds=5, seed=3)
        assert workload != draw_workload(mix, rate=20, seconds=5, seed=4)
        lengths = [request.arrival.prompt_tokens + request.arrival.max_tokens for request in workload.requests]
        assert 50 < len(lengths) < 200
        assert max(lengths) <= MAX_MODEL_LEN <= (BLOCKS["tight"] - 1) * BLOCK_SIZE


def test_equal_names_of_blocks_are_equal_tokens() -> None:
    composed = compose(load_config(None, {"model": "fake"}, environment={}))
    workload = draw_workload(MIXES["prefix"], rate=20, seconds=2, seed=1)
    prompts = [Prompts(composed, 1).make(request, index) for index, request in enumerate(workload.requests)]
    tokens_of: dict[int, list[int]] = {}
    for request, prompt in zip(workload.requests, prompts, strict=True):
        assert len(prompt) == request.arrival.prompt_tokens
        for index, name in enumerate(request.arrival.blocks):
            block = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            assert tokens_of.setdefault(name, block) == block
    assert len({tuple(block) for block in tokens_of.values()}) == len(tokens_of)


def test_a_run_has_the_workload_in_it(tmp_path: Path) -> None:
    workload = draw_workload(MIXES["prefix"], rate=100, seconds=0.3, seed=2)
    run = run_workload(workload, tmp_path, model="fake", num_blocks=256, max_model_len=MAX_MODEL_LEN)
    recorded = read_run(run.folder)
    assert null_test(recorded, run.folder).difference == ""
    lengths = [(request.arrival.prompt_tokens, request.outputs[0].num_tokens) for request in recorded.workload.requests]
    asked = [(request.arrival.prompt_tokens, request.arrival.max_tokens) for request in workload.requests]
    assert sorted(lengths) == sorted(asked)
    # Prefixes are shared as in the workload.
    names = {name for request in workload.requests for name in request.arrival.blocks}
    assert len({name for request in recorded.workload.requests for name in request.arrival.blocks}) == len(names)


def test_all_settings_come_up() -> None:
    chosen = settings(20)
    assert len(set(chosen)) == 20
    for values in zip(*chosen, strict=True):
        counts = [values.count(value) for value in set(values)]
        assert max(counts) - min(counts) <= 2
