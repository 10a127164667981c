"""Measures steps of several shapes before a worker is ready, so that the engine can predict step times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from eventlm.core.graph_buckets import bucket_of
from eventlm.core.predictor import NUM_COEFFICIENTS
from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import ceil_div
from eventlm.worker.protocol import NewSequence, StepOutput, StepPayload, StepSample, WorkerSetup

_BUDGET_NS = 2_000_000_000
#: Two runs of a shape take less than this many of the dearest before it.
_GROWTH = 4
#: Of the warm-up's sequences; no request has it, since the seq of an arrival is never negative.
_REQUEST = -1


class Shape(NamedTuple):
    """A step of `num_rows` sequences that compute `num_tokens` tokens each behind `context` others."""

    num_rows: int
    num_tokens: int
    context: int


class MeasuredRunner(Protocol):
    """A runner of either kind, whose steps can be run one by one. This module loads no torch: the engine imports it."""

    setup: WorkerSetup

    @property
    def num_blocks(self) -> int:
        """KV blocks that it has."""
        ...

    @property
    def cache(self) -> Any:
        """The KV cache."""
        ...

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """A step from its launch to its tokens."""
        ...


#: From cheap to dear, decodes and prompts in turn; the dear ones are left out where time is short, but never so many
#: that the predictor could not be fitted.
_SHAPES = (
    Shape(1, 1, 32),
    Shape(1, 16, 0),
    Shape(8, 1, 128),
    Shape(1, 64, 0),
    Shape(32, 1, 128),
    Shape(1, 128, 512),
    Shape(16, 1, 512),
    Shape(1, 256, 0),
    Shape(64, 1, 256),
    Shape(1, 512, 0),
    Shape(1, 512, 1024),
    Shape(32, 1, 1024),
    Shape(1, 1024, 0),
    Shape(1, 2048, 0),
    Shape(256, 1, 512),
    Shape(1, 4096, 0),
    Shape(1, 8192, 0),
)


def warm_up(runner: MeasuredRunner) -> list[StepSample]:
    """Times of the steps that fit into the worker's limits and two seconds, or of the first five that fit its limits.

    The runner is afterwards as before.
    """
    started_ns = time.perf_counter_ns()
    samples: list[StepSample] = []
    num_blocks = 0
    dearest_ns = 0
    # It may have been left to the runner how many blocks there are.
    for shape in fitting_shapes(structs.replace(runner.setup, num_blocks=runner.num_blocks)):
        spent_ns = time.perf_counter_ns() - started_ns
        is_late = spent_ns + _GROWTH * dearest_ns > _BUDGET_NS
        if is_late and len(samples) >= NUM_COEFFICIENTS:
            break
        num_blocks = max(num_blocks, _num_blocks(shape, runner.setup))
        if not is_late:
            # The first of a shape pays for memory and for kernels that are built on demand.
            measure(runner, shape)
        samples.append(measure(runner, shape))
        dearest_ns = max(dearest_ns, samples[-1].duration_ns)
    runner.cache.clear(num_blocks)
    return samples


def fitting_shapes(setup: WorkerSetup, shapes: Sequence[Shape] = _SHAPES) -> list[Shape]:
    """Those steps that a worker can take within its limits; by default of a warm-up's.

    One that does not know yet how many blocks it has may have enough for all of them.
    """
    return [shape for shape in shapes if _fits(shape, setup)]


def _fits(shape: Shape, setup: WorkerSetup) -> bool:
    return (
        shape.num_rows <= setup.max_num_seqs
        and shape.num_rows * shape.num_tokens <= setup.max_num_batched_tokens
        and shape.context + shape.num_tokens <= setup.max_model_len
        and (not setup.num_blocks or _num_blocks(shape, setup) <= setup.num_blocks)
    )


def _num_blocks(shape: Shape, setup: WorkerSetup) -> int:
    """All rows share their blocks: what is in them does not matter here."""
    return ceil_div(shape.context + shape.num_tokens, setup.block_size)


def measure(runner: MeasuredRunner, shape: Shape) -> StepSample:
    """Run a step of this shape; how long it took."""
    num_rows, num_tokens, context = shape
    length = context + num_tokens
    numbers = list(range(_num_blocks(shape, runner.setup)))
    is_decode = num_tokens == 1
    launch = Launched(
        replica=runner.setup.replica,
        epoch=runner.setup.epoch,
        step=0,
        decodes=[(_REQUEST, index, length, 0) for index in range(num_rows)] if is_decode else [],
        chunks=[] if is_decode else [(_REQUEST, index, context, num_tokens, 1) for index in range(num_rows)],
        blocks=[(row, 0, numbers) for row in range(num_rows)],
        num_tokens=num_rows * num_tokens,
        predicted_ns=0,
        bucket=bucket_of(runner.setup.graph_buckets, num_rows) if is_decode else 0,
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    new = [
        NewSequence(request=_REQUEST, index=index, token_ids=[0] * length, num_prompt_tokens=length, params=params)
        for index in range(num_rows)
    ]
    start_ns = time.perf_counter_ns()
    runner.execute(launch, StepPayload(new=new))
    duration_ns = time.perf_counter_ns() - start_ns
    _forget(runner, num_rows)
    return sample_of(shape, duration_ns)


def sample_of(shape: Shape, duration_ns: int) -> StepSample:
    """A step of this shape, in the predictor's features."""
    num_rows, num_tokens, context = shape
    is_decode = num_tokens == 1
    return StepSample(
        prefill_tokens=0 if is_decode else num_rows * num_tokens,
        num_decodes=num_rows if is_decode else 0,
        context_tokens=num_rows * (context + num_tokens),
        chunk_context=0 if is_decode else num_rows * num_tokens * (context + num_tokens // 2),
        duration_ns=duration_ns,
    )


def _forget(runner: MeasuredRunner, num_rows: int) -> None:
    launch = Launched(
        replica=runner.setup.replica,
        epoch=runner.setup.epoch,
        step=0,
        forget=[(_REQUEST, index) for index in range(num_rows)],
        num_tokens=0,
        predicted_ns=0,
    )
    runner.execute(launch, StepPayload())
