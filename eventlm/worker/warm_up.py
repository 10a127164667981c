"""Steps that run before a worker is ready, to measure them for the engine's predictor or to compile kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from eventlm.core.graph_buckets import bucket_of
from eventlm.core.predictor import NUM_COEFFICIENTS, StepShape
from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import OnProgress, ceil_div
from eventlm.worker.protocol import NewSequence, StepOutput, StepPayload, StepSample, WorkerSetup

_BUDGET_NS = 2_000_000_000
#: Two runs of a shape take less than this many of the slowest before it.
_GROWTH = 4
#: Shapes that several ranks measure. They run the same steps, so none of them may stop where its own clock says so.
_SHAPES_OF_RANKS = 8
#: Of the warm-up's sequences; no request has it, since the seq of an arrival is never negative.
_REQUEST = -1
#: Ways to draw that have kernels of their own on a GPU.
_PARAMS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=10, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=1.0, ignore_eos=True),
)
_PROMPT_TOKENS = 2


class Shape(NamedTuple):
    """A step of `num_rows` sequences that compute `num_tokens` tokens each after `context` others."""

    num_rows: int
    num_tokens: int
    context: int

    def step_shape(self) -> StepShape:
        """What such a step computes; rows of one token are decodes."""
        if self.num_tokens == 1:
            return StepShape(num_decodes=self.num_rows, context_tokens=self.num_rows * (self.context + 1))
        shape = StepShape()
        for _ in range(self.num_rows):
            shape.add_chunk(self.context, self.num_tokens)
        return shape


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


#: From fast to slow, decodes and prompts in turn. Slow ones are left out if time is short, but never so many that the
#: predictor could not be fitted.
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
    """Times of the steps that fit into the worker's limits and two seconds, or of the first five that fit its limits;
    of several ranks, always of the first few. The runner is afterwards as before.
    """
    started_ns = time.perf_counter_ns()
    samples: list[StepSample] = []
    num_blocks = 0
    dearest_ns = 0
    # It may have been left to the runner how many blocks there are.
    shapes = fitting_shapes(structs.replace(runner.setup, num_blocks=runner.num_blocks))
    is_one_of_several = runner.setup.layout.num_ranks > 1
    for shape in shapes[:_SHAPES_OF_RANKS] if is_one_of_several else shapes:
        spent_ns = time.perf_counter_ns() - started_ns
        is_late = not is_one_of_several and spent_ns + _GROWTH * dearest_ns > _BUDGET_NS
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
        # All blocks are of the first KV group.
        and (setup.layout.groups == 1 or shape.context + shape.num_tokens <= setup.kv_shard_tokens)
    )


def _num_blocks(shape: Shape, setup: WorkerSetup) -> int:
    """All rows share their blocks: what is in them does not matter here."""
    return ceil_div(shape.context + shape.num_tokens, setup.block_size)


def measure(runner: MeasuredRunner, shape: Shape) -> StepSample:
    """Run a step of this shape; how long it took."""
    num_rows, num_tokens, context = shape
    is_decode = num_tokens == 1
    duration_ns = _run(
        runner,
        num_decodes=num_rows if is_decode else 0,
        num_prompts=0 if is_decode else num_rows,
        context=context,
        num_tokens=num_tokens,
        params=_PARAMS[0],
    )
    return StepSample(shape=shape.step_shape(), duration_ns=duration_ns)


def warm_kernels(runner: MeasuredRunner, on_progress: OnProgress | None = None) -> None:
    """Compile the kernels that steps will need: a request that is the first to need one would wait for it.

    Runs steps of all kinds: decodes beside a prompt, as many as make their kernels differ, drawn in all ways. Triton
    keeps what it compiles on disk, so only the first start on a machine takes long.
    """
    setup = runner.setup
    most = min(setup.max_num_seqs - 1, setup.max_num_batched_tokens - _PROMPT_TOKENS)
    kinds = [(num_decodes, params) for params in _PARAMS for num_decodes in _counts(most)]
    for number, (num_decodes, params) in enumerate(kinds, 1):
        _run(runner, num_decodes=num_decodes, num_prompts=1, context=0, num_tokens=_PROMPT_TOKENS, params=params)
        if on_progress is not None:
            on_progress(number, len(kinds))


def _counts(most: int) -> Iterator[int]:
    """Numbers of decodes beside a prompt: none, powers of two, and the most; at all others kernels are as at these."""
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    if most > 0:
        yield most


def _run(
    runner: MeasuredRunner, *, num_decodes: int, num_prompts: int, context: int, num_tokens: int, params: SamplingParams
) -> int:
    """Run a step whose sequences have `context` + `num_tokens` tokens and share their blocks; how long it took in ns.

    Prompts compute `num_tokens` of them, decodes the last.
    """
    setup, length, numbers = runner.setup, context + num_tokens, range(num_decodes + num_prompts)
    launch = Launched(
        replica=setup.replica,
        epoch=setup.epoch,
        step=0,
        decodes=[(_REQUEST, index, length, 0) for index in numbers[:num_decodes]],
        chunks=[(_REQUEST, index, context, num_tokens, 1) for index in numbers[num_decodes:]],
        blocks=[(row, 0, list(range(ceil_div(length, setup.block_size)))) for row in numbers],
        num_tokens=num_decodes + num_prompts * num_tokens,
        predicted_ns=0,
        bucket=0 if num_prompts else bucket_of(setup.graph_buckets, num_decodes),
        # Each goes on in a slot of its own, with what is in there.
        states=[(row, row, row, []) for row in numbers] if setup.state_slots else [],
    )
    new = [
        NewSequence(request=_REQUEST, index=index, token_ids=[0] * length, num_prompt_tokens=length, params=params)
        for index in numbers
    ]
    start_ns = time.perf_counter_ns()
    runner.execute(launch, StepPayload(new=new))
    duration_ns = time.perf_counter_ns() - start_ns
    forget = Launched(
        replica=setup.replica,
        epoch=setup.epoch,
        step=0,
        forget=[(_REQUEST, index) for index in numbers],
        num_tokens=0,
        predicted_ns=0,
    )
    runner.execute(forget, StepPayload())
    return duration_ns
