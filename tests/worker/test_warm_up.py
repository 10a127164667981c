from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eventlm.core.predictor import NUM_COEFFICIENTS
from eventlm.worker import warm_up as warm_up_module
from eventlm.worker.protocol import StepSample
from eventlm.worker.warm_up import warm_up
from tests.checkpoints import make_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import make_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_samples_span_prompts_contexts_and_decodes(folder: Path) -> None:
    samples = warm_up(make_runner(folder, max_model_len=1024))
    assert len({sample.prefill_tokens for sample in samples}) >= 4
    assert len({sample.num_decodes for sample in samples}) >= 4
    assert any(sample.chunk_context > sample.prefill_tokens**2 for sample in samples)
    assert all(sample.duration_ns > 0 for sample in samples)


def test_features_of_a_chunk_and_of_decodes(folder: Path) -> None:
    samples = {
        (sample.prefill_tokens, sample.num_decodes, sample.context_tokens): sample
        for sample in warm_up(make_runner(folder, max_model_len=1024))
    }
    chunk = samples[128, 0, 640]
    assert chunk.chunk_context == 128 * (512 + 64)
    decodes = samples[0, 8, 8 * 129]
    assert decodes.chunk_context == 0


def test_the_runner_is_as_before(folder: Path) -> None:
    runner = make_runner(folder)
    warm_up(runner)
    assert not runner.cache.kv.any()
    step = launched(0, chunks=[(-1, 0, 0, 3, 1)], blocks=[(0, 0, [0])])
    runner.execute(step, payload(new_sequence(-1, [5, 6, 7])))


def test_limits_of_the_worker_are_kept(folder: Path) -> None:
    runner = make_runner(folder, num_blocks=9, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16)
    samples = warm_up(runner)
    assert [(sample.prefill_tokens, sample.num_decodes) for sample in samples] == [(16, 0)]


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
    runner.cache.kv[:, :, 200:] = 1.0
    warm_up(runner)
    assert torch.all(runner.cache.kv[:, :, 200:] == 1.0)
