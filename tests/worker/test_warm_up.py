from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from eventlm.core.predictor import NUM_COEFFICIENTS, StepShape
from eventlm.core.shards import Layout
from eventlm.events import Launched
from eventlm.worker import warm_up as warm_up_module
from eventlm.worker.protocol import StepPayload, StepSample
from eventlm.worker.warm_up import fitting_shapes, warm_kernels, warm_up
from tests.checkpoints import make_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import make_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_samples_span_prompts_contexts_and_decodes(folder: Path) -> None:
    samples = warm_up(make_runner(folder, max_model_len=1024))
    shapes = [sample.shape for sample in samples]
    assert len({shape.prefill_tokens for shape in shapes}) >= 4
    assert len({shape.num_decodes for shape in shapes}) >= 4
    assert any(shape.chunk_context > shape.prefill_tokens**2 for shape in shapes)
    assert all(sample.duration_ns > 0 for sample in samples)


def test_features_of_a_chunk_and_of_decodes(folder: Path) -> None:
    shapes = [sample.shape for sample in warm_up(make_runner(folder, max_model_len=1024))]
    assert StepShape(128, 0, 640, chunk_context=128 * (512 + 64), num_chunks=1) in shapes
    assert StepShape(num_decodes=8, context_tokens=8 * 129) in shapes


def test_the_runner_is_as_before(folder: Path) -> None:
    runner = make_runner(folder)
    warm_up(runner)
    assert not runner.cache.kv.any()
    step = launched(0, chunks=[(-1, 0, 0, 3, 1)], blocks=[(0, 0, [0])])
    runner.execute(step, payload(new_sequence(-1, [5, 6, 7])))


def test_limits_of_the_worker_are_kept(folder: Path) -> None:
    runner = make_runner(folder, num_blocks=9, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16)
    samples = warm_up(runner)
    assert [(sample.shape.prefill_tokens, sample.shape.num_decodes) for sample in samples] == [(16, 0)]


def test_a_slow_machine_measures_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    runner = make_runner(folder)
    execute = runner.execute

    def slow_execute(*args: object) -> object:
        nonlocal now_ns
        now_ns += 300_000_000
        return execute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "execute", slow_execute)
    monkeypatch.setattr(warm_up_module.time, "perf_counter_ns", lambda: now_ns)
    samples: list[StepSample] = warm_up(runner)
    # As few as can be fitted, and each of them once, but for the first: a run is a step and a step that forgets it.
    assert len(samples) == NUM_COEFFICIENTS
    assert now_ns == (NUM_COEFFICIENTS + 1) * 2 * 300_000_000


def test_the_cache_is_not_touched_beyond_what_was_used(folder: Path) -> None:
    runner = make_runner(folder, num_blocks=256)
    for layer in runner.cache.stored:
        layer[:, 200:] = 1.0
    warm_up(runner)
    assert all(torch.all(layer[:, 200:] == 1.0) for layer in runner.cache.stored)


def steps_for(*, max_num_seqs: int, max_num_batched_tokens: int) -> list[Launched]:
    """All launches with rows."""
    launches: list[Launched] = []

    def execute(launch: Launched, payload: StepPayload) -> None:
        if launch.num_tokens:
            launches.append(launch)

    setup = SimpleNamespace(
        replica=0,
        epoch=1,
        block_size=16,
        state_slots=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    runner: Any = SimpleNamespace(setup=setup, execute=execute)
    warm_kernels(runner)
    return launches


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "num_decodes"),
    [
        (1, 64, [0]),
        (2, 64, [0, 1]),
        (9, 64, [0, 1, 2, 4, 8]),
        (12, 64, [0, 1, 2, 4, 8, 11]),
        (12, 12, [0, 1, 2, 4, 8, 10]),
        (5, 5, [0, 1, 2, 3]),
        (1, 1, [0]),
    ],
)
def test_steps_go_up_to_the_largest_within_the_limits(
    max_num_seqs: int, max_num_batched_tokens: int, num_decodes: list[int]
) -> None:
    launches = steps_for(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert [len(launch.decodes) for launch in launches] == 3 * num_decodes
    assert max(len(launch.decodes) + len(launch.chunks) for launch in launches) <= max_num_seqs


def test_ranks_measure_the_same_steps_however_slow_one_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    for step_ns in (1, 300_000_000):
        now_ns = 0
        runner = make_runner(folder)
        runner.setup = structs.replace(runner.setup, layout=Layout(tensor=2))
        launches: list[Launched] = []
        execute = runner.execute

        def slow_execute(launch: Launched, beside: StepPayload) -> object:
            nonlocal now_ns
            now_ns += step_ns  # noqa: B023
            launches.append(launch)  # noqa: B023
            return execute(launch, beside)  # noqa: B023

        monkeypatch.setattr(runner, "execute", slow_execute)
        monkeypatch.setattr(warm_up_module.time, "perf_counter_ns", lambda: now_ns)  # noqa: B023
        warm_up(runner)
        shapes.append(launches)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 4 * NUM_COEFFICIENTS


def test_steps_of_kv_groups_lie_in_the_first(folder: Path) -> None:
    setup = make_runner(folder, max_model_len=1024).setup
    shared = structs.replace(setup, layout=Layout(1, 1, 2), kv_shard_tokens=200)
    lengths = [shape.context + shape.num_tokens for shape in fitting_shapes(shared)]
    assert len(lengths) >= NUM_COEFFICIENTS
    assert max(lengths) <= 200 < max(shape.context + shape.num_tokens for shape in fitting_shapes(setup))
