"""Steps measured on a real engine with a fake worker, and what is made of single events."""

from __future__ import annotations

import pytest

from eventlm.bench.step.floor import BatchShape
from eventlm.bench.step.measure import (
    ENGINE,
    EXCHANGE,
    NUM_PREFILLS,
    STAGE_BEFORE,
    TRANSPORT,
    StepBench,
    StepCase,
    check_cases,
    measured_step,
    prompt_of,
)
from eventlm.bootstrap.composition import compose_engine
from eventlm.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.errors import UsageError
from eventlm.events import Launched, StepCompleted, StepOps


def engine(parallel: ParallelConfig | None = None, **scheduler: int) -> InferenceEngine:
    return compose_engine(
        Config(
            model=ModelConfig(model="fake", max_model_len=512),
            cache=CacheConfig(num_blocks=256),
            scheduler=SchedulerConfig(**scheduler),
            worker=WorkerConfig(profile_ops=True),
            parallel=parallel or ParallelConfig(),
        )
    )[0]


async def test_cases_are_measured_one_after_the_other() -> None:
    running = engine(max_num_seqs=16, max_num_batched_tokens=64)
    await running.start()
    try:
        bench = StepBench(running, num_steps=6, temperature=0.0)
        decode = await bench.measure(StepCase(4, 60))
        prefill = await bench.measure(StepCase(0, 100))
    finally:
        await running.stop()
    assert len(decode.steps) == 6
    assert {(step.shape.num_tokens, step.shape.num_sampled) for step in decode.steps} == {(4, 4)}
    # A token more for each of the four in every step, around the context that was asked for.
    contexts = [step.shape.kv_tokens() for step in decode.steps]
    assert contexts == [contexts[0] + 4 * index for index in range(6)]
    assert 4 * 50 < contexts[0] < 4 * 70
    # Two chunks are one prompt, of whose tokens the last one samples.
    assert [step.shape for step in prefill.steps] == [BatchShape(1, [(0, 64), (64, 36)])] * NUM_PREFILLS
    for step in (*decode.steps, *prefill.steps):
        assert sum(step.ops.values()) == step.duration_ns
    assert prefill.engine_cpu_ns > 0


async def test_steps_of_a_pipeline_have_the_batch_each() -> None:
    running = engine(ParallelConfig(pipeline_parallel_size=2), max_num_seqs=16, max_num_batched_tokens=64)
    await running.start()
    try:
        bench = StepBench(running, num_steps=6, temperature=0.0)
        decode = await bench.measure(StepCase(7, 60))
        prefill = await bench.measure(StepCase(0, 100))
    finally:
        await running.stop()
    assert len(decode.steps) == 6
    assert {step.shape.num_tokens for step in decode.steps} == {7}
    assert {step.shape.num_tokens for step in prefill.steps} == {100}
    for step in (*decode.steps, *prefill.steps):
        assert sum(step.ops.values()) == step.duration_ns
        assert step.ops[STAGE_BEFORE] >= 0
    # The first chunk goes through a stage before the last one has anything to do.
    assert all(step.ops[STAGE_BEFORE] > 0 for step in prefill.steps)


def launch_of(step: int, ts: int, start: int = 0) -> Launched:
    chunk = (1, 0, start, 2, 1)
    return Launched(ts=ts, replica=0, epoch=1, step=step, chunks=[chunk], num_tokens=2, predicted_ns=0)


def end_of(step: int, start_ns: int, end_ns: int) -> StepCompleted:
    return StepCompleted(replica=0, epoch=1, step=step, start_ns=start_ns, end_ns=end_ns, produced=[1])


@pytest.mark.parametrize(("decided_ns", "whose", "other"), [(900, TRANSPORT, ENGINE), (1_040, ENGINE, TRANSPORT)])
def test_the_time_before_a_step_counts_for_the_later_of_loop_and_worker(
    decided_ns: int, whose: str, other: str
) -> None:
    ops = {"attention": 300, "prepare": 50}
    step = measured_step(launch_of(3, decided_ns), end_of(3, 1_100, 1_500), 1_000, ops)
    assert step.duration_ns == 500
    assert step.ops == {"attention": 300, "prepare": 100, whose: 100, other: 0}


def test_the_last_stage_waits_for_the_one_before_it() -> None:
    """A step of a pipeline lasts as long as it keeps the last stage, whose operations are measured."""
    stages = [(700, 1_080), (1_100, 1_500)]
    ended = StepCompleted(replica=0, epoch=1, step=3, start_ns=700, end_ns=1_500, produced=[1], stages=stages)
    step = measured_step(launch_of(3, 600), ended, 1_000, {"attention": 300, STAGE_BEFORE: 10})
    assert step.duration_ns == 500
    own = {"attention": 300, "prepare": 90}
    assert step.ops == own | {STAGE_BEFORE: 10 + 80, EXCHANGE: 20, TRANSPORT: 0, ENGINE: 0}
    late = measured_step(launch_of(3, 650), ended, 600, {})
    assert late.ops == {"prepare": 400, STAGE_BEFORE: 380, EXCHANGE: 20, TRANSPORT: 0, ENGINE: 100}
    # It was there before the last stage was free.
    behind = measured_step(launch_of(3, 600), ended, 1_100, {})
    assert behind.ops == {"prepare": 400, STAGE_BEFORE: 0, EXCHANGE: 0, TRANSPORT: 0, ENGINE: 0}


def test_the_steps_of_a_prompt_are_put_together() -> None:
    events = [launch_of(1, 10), launch_of(2, 10, start=2), end_of(1, 30, 100), end_of(2, 110, 300)]
    ops = [StepOps(replica=0, epoch=1, step=step, ops={"attention": 40}) for step in (1, 2)]
    # The end of a step that was launched before is none of it.
    stray = StepOps(replica=0, epoch=1, step=0, ops={"attention": 9})
    step = prompt_of([*events, stray, *ops])
    assert step.duration_ns == 290
    assert step.ops == {"attention": 80, "prepare": 30 + 150, TRANSPORT: 20 + 10, ENGINE: 0}
    assert step.shape == BatchShape(2, [(0, 2), (2, 2)])


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        (StepCase(1, 600), "context is 512; lower --context or --steps"),
        (StepCase(17, 64), "--max-num-seqs is 16; raise it or lower --batch"),
        (StepCase(16, 400), "there are 256; raise --num-blocks"),
        (StepCase(0, 512), "513 tokens .*; lower --prefill"),
    ],
)
def test_a_case_without_room_is_refused(case: StepCase, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_cases(engine(max_num_seqs=16), [case], 8)
