"""Where the time of a step goes: steps of one shape, run by an engine and its worker process as they serve.

The worker reports when each of its steps began and ended and what its operations took; the log has the time of the
engine's decision. A step lasts from the end of the one before it to its own: of a pipeline, too, whose steps overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.bench.draws import random_stream
from eventlm.bench.step.floor import BatchShape, shape_of
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import Request, RequestHandle
from eventlm.errors import EventLMError, UsageError
from eventlm.events import Event, Launched, StepCompleted, StepOps
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import ceil_div

#: Steps of a batch that are not measured: memory is touched for the first time, and the engine gets ahead.
NUM_WARMUP_STEPS = 4
#: Prompts of `--prefill` that are measured, after one that is not.
NUM_PREFILLS = 5
#: Parts of a step's time that are not the worker's.
TRANSPORT, ENGINE = "transport", "engine"
#: What the last stage of a pipeline spends on waiting for the one before it: ranks that wait for each other call it so.
STAGE_BEFORE = "meeting"
#: And what a step takes from there to the last stage.
EXCHANGE = "hand_over"


class StepCase(NamedTuple):
    """A step to measure: `batch` decodes of sequences that hold `context` tokens, or one prompt (batch 0). A pipeline
    decodes as many more sequences in its other steps under way.
    """

    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode, batch {self.batch}, context {self.context}" if self.batch else f"prefill {self.context}"


class MeasuredStep(NamedTuple):
    """Times of a step (or of the steps of one prompt) by operation in ns, and its shape.

    `ops` add up to `duration_ns`; those that are not the worker's own are TRANSPORT and ENGINE.
    """

    duration_ns: int
    ops: dict[str, int]
    shape: BatchShape


class CaseResult(NamedTuple):
    """The measured steps of a case, and the processor time of the engine's process for each, which runs beside them."""

    case: StepCase
    steps: list[MeasuredStep]
    engine_cpu_ns: float


class StepRecorder:
    """Collects the steps of one case from the events. Attach it to the bus; `found` is set with the last.

    is_wanted: whether a launch is one of those to measure; only steps that follow another such step at once are.
    """

    def __init__(self, num_wanted: int, is_wanted: Callable[[Launched], bool]) -> None:
        self.found = asyncio.Event()
        self.steps: list[MeasuredStep] = []
        self.cpu_times_ns: list[int] = []
        self._num_wanted = num_wanted
        self._is_wanted = is_wanted
        self._launches: dict[int, Launched] = {}
        self._ended: dict[int, StepCompleted] = {}
        self._num_seen = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Launched):
            self._launches[event.step] = event
        elif isinstance(event, StepCompleted):
            self._ended[event.step] = event
        elif isinstance(event, StepOps) and not self.found.is_set():
            self._add(event)

    def _add(self, marker: StepOps) -> None:
        number = marker.step
        launch, before = self._launches.get(number), self._launches.pop(number - 1, None)
        ended, ended_before = self._ended.get(number), self._ended.pop(number - 1, None)
        if launch is None or before is None or ended is None or ended_before is None:
            return
        if not (self._is_wanted(launch) and self._is_wanted(before)):
            return
        self._num_seen += 1
        if self._num_seen <= NUM_WARMUP_STEPS:
            return
        self.steps.append(measured_step(launch, ended, ended_before.end_ns, marker.ops))
        self.cpu_times_ns.append(time.process_time_ns())
        if len(self.steps) >= self._num_wanted:
            self.found.set()

    @property
    def engine_cpu_ns(self) -> float:
        """Processor time of this process for a step."""
        times = self.cpu_times_ns
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def measured_step(launch: Launched, ended: StepCompleted, from_ns: int, ops: Mapping[str, int]) -> MeasuredStep:
    """A step that could begin at `from_ns`: the time until it did is the engine's if the launch was not decided on by
    then, else the transport's. What the worker's operations leave of its time is its `prepare`.

    Operations are those of a pipeline's last stage. While an earlier one computes the step, the last one waits for it,
    and then until the step has been handed over.
    """
    start_ns = ended.stages[-1][0] if ended.stages else ended.start_ns
    gap_ns = max(start_ns - from_ns, 0)
    rest_ns = ended.end_ns - start_ns - sum(ops.values())
    waited = ENGINE if launch.ts > from_ns else TRANSPORT
    parts = dict(ops) | {"prepare": ops.get("prepare", 0) + rest_ns, TRANSPORT: 0, ENGINE: 0}
    if ended.stages:
        came_ns = ended.stages[-2][1]
        before_ns = min(max(came_ns - max(ended.start_ns, from_ns), 0), gap_ns)
        parts[STAGE_BEFORE] = parts.get(STAGE_BEFORE, 0) + before_ns
        parts[EXCHANGE] = min(max(start_ns - max(came_ns, from_ns), 0), gap_ns - before_ns)
        gap_ns -= before_ns + parts[EXCHANGE]
    parts[waited] = gap_ns
    return MeasuredStep(ended.end_ns - from_ns, parts, shape_of(launch))


def check_cases(engine: InferenceEngine, cases: Sequence[StepCase], num_steps: int) -> None:
    """Raise UsageError for a case that this engine has no room for, as far as that is known before its start."""
    core = engine.setup.core
    for case in cases:
        prompt, output = _lengths(engine, case, num_steps)
        length = prompt + output
        if length > core.max_model_len:
            asked = "--context or --steps" if case.batch else "--prefill"
            raise UsageError(
                f"{case}: {length:,} tokens with its steps, but the context is {core.max_model_len:,}; lower {asked}"
            )
        if case.batch > core.max_num_seqs:
            raise UsageError(f"{case}: --max-num-seqs is {core.max_num_seqs}; raise it or lower --batch")
        needed = max(_num_sequences(engine, case), 1) * (ceil_div(length, core.block_size) + 1)
        if 0 < core.blocks_per_replica < needed:
            remedy = "--num-blocks" if engine.setup.config.cache.num_blocks else "--kv-memory"
            raise UsageError(
                f"{case}: needs {needed:,} KV blocks, there are {core.blocks_per_replica:,}; raise {remedy}"
            )


def _lengths(engine: InferenceEngine, case: StepCase, num_steps: int) -> tuple[int, int]:
    """Prompt and most output tokens. In the middle of the measured steps a sequence has about `context` tokens."""
    if not case.batch:
        return case.context, 1
    core = engine.setup.core
    # Steps until the last prompt is computed, in which the first ones decode already.
    ramp = ceil_div(_num_sequences(engine, case) * case.context, core.max_num_batched_tokens) + 1
    # A sequence decodes in one of so many.
    num_steps = ceil_div(num_steps + NUM_WARMUP_STEPS, core.decode_batches)
    prompt = max(case.context - (num_steps + ramp) // 2, 1)
    if core.decode_batches > 1:
        # Whole blocks, which the prefix cache has by then, and a token to compute.
        prompt -= (prompt - 1) % core.block_size
    return prompt, num_steps + 2 * ramp + 8


def _num_sequences(engine: InferenceEngine, case: StepCase) -> int:
    """So many that each step of a pipeline, which takes its share of them, decodes the case's batch."""
    return case.batch * engine.setup.core.decode_batches


class StepBench:
    """Measures case after case on a started engine. Requests are random tokens, no two with the same prompt."""

    def __init__(self, engine: InferenceEngine, *, num_steps: int, temperature: float, seed: int = 0) -> None:
        self._engine = engine
        self._num_steps = num_steps
        self._temperature = temperature
        self._seed = seed
        self._num_made = 0

    async def measure(self, case: StepCase) -> CaseResult:
        """The steps of a case. Raises EngineUnavailableError if the engine dies."""
        return await (self._decode(case) if case.batch else self._prefill(case))

    async def _decode(self, case: StepCase) -> CaseResult:
        recorder = StepRecorder(self._num_steps, lambda launch: len(launch.decodes) == case.batch and not launch.chunks)
        self._engine.bus.attach(recorder)
        try:
            handles = await self._engine.submit(
                [self._request(case) for _ in range(_num_sequences(self._engine, case))]
            )
            ends: asyncio.Future[list[None]] = asyncio.gather(*(_end(handle) for handle in handles))
            found = asyncio.ensure_future(recorder.found.wait())
            either: set[asyncio.Future[Any]] = {ends, found}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for handle in handles:
                handle.cancel()
            found.cancel()
            await ends
        finally:
            self._engine.bus.detach(recorder)
        if not recorder.steps:
            raise EventLMError(f"{case}: the engine never ran all of them in one step")
        return CaseResult(case, recorder.steps, recorder.engine_cpu_ns)

    async def _compute_prompts(self, requests: Sequence[Request]) -> None:
        """So that later one step begins all of them: those of a pipeline that begin apart stay in uneven steps."""
        prompts = [
            structs.replace(request, sampling=structs.replace(request.sampling, max_tokens=1)) for request in requests
        ]
        for handle in await self._engine.submit(prompts):
            await _end(handle)

    async def _prefill(self, case: StepCase) -> CaseResult:
        """Prompts one after the other; the steps of each count as one."""
        await self._one_prompt(case)
        before_ns = time.process_time_ns()
        steps = [await self._one_prompt(case) for _ in range(NUM_PREFILLS)]
        return CaseResult(case, steps, (time.process_time_ns() - before_ns) / NUM_PREFILLS)

    async def _one_prompt(self, case: StepCase) -> MeasuredStep:
        events: list[Event] = []
        self._engine.bus.attach(events.append)
        try:
            for handle in await self._engine.submit([self._request(case)]):
                await _end(handle)
        finally:
            self._engine.bus.detach(events.append)
        return prompt_of(events)

    def _request(self, case: StepCase) -> Request:
        prompt_tokens, output_tokens = _lengths(self._engine, case, self._num_steps)
        index, self._num_made = self._num_made, self._num_made + 1
        random = random_stream(self._seed, "step prompt", index)
        return Request(
            prompt_token_ids=random.integers(self._engine.setup.vocab_size, size=prompt_tokens).tolist(),
            sampling=SamplingParams(
                temperature=self._temperature, max_tokens=output_tokens, ignore_eos=True, seed=index
            ),
            scheduling=SchedulingParams(model=self._engine.model_names[0], offline=True),
        )


def prompt_of(events: Sequence[Event]) -> MeasuredStep:
    """The steps of the only prompt in these events, from its arrival to the end of the last of them, as one."""
    launches = {event.step: event for event in events if isinstance(event, Launched) and event.chunks}
    ends = {event.step: event for event in events if isinstance(event, StepCompleted)}
    from_ns = min(launch.ts for launch in launches.values())
    parts: dict[str, int] = {}
    shapes = []
    duration_ns = 0
    for marker in events:
        if not isinstance(marker, StepOps) or marker.step not in launches:
            continue
        step = measured_step(launches[marker.step], ends[marker.step], from_ns, marker.ops)
        from_ns = ends[marker.step].end_ns
        duration_ns += step.duration_ns
        shapes.append(step.shape)
        for part, time_ns in step.ops.items():
            parts[part] = parts.get(part, 0) + time_ns
    rows = [row for shape in shapes for row in shape.rows]
    return MeasuredStep(duration_ns, parts, BatchShape(sum(shape.num_sampled for shape in shapes), rows))


async def _end(handle: RequestHandle) -> None:
    async for _ in handle:
        pass
