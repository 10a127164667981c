"""Runs a workload against a real engine in this process, open loop, and records it.

Prompts are random tokens of the workload's lengths: equal names of blocks stand for equal tokens, so that what shares a
prefix in the workload shares it here. Outputs go on to their `max_tokens`. The same workload with the same seed gives
the same prompts and the same arrivals, whatever the engine does with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import uvloop

from eventlm.bench.draws import random_stream
from eventlm.bootstrap.composition import Composition, compose
from eventlm.bus.log_reader import LogReader
from eventlm.config.load import load_config
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import Request
from eventlm.events import Arrived
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams

BLOCK_SIZE = 16


class Part(NamedTuple):
    """Some of a mix's requests: how often they come, and bounds of their lengths in tokens."""

    weight: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    #: Tokens that a prompt shares with the others of its family, beside its own, and how many families there are.
    prefix_tokens: int = 0
    num_families: int = 1


#: Short prompts; long ones among short ones; prompts that share a beginning. Small enough for a small model on two
#: cores to serve a few a second.
MIXES: dict[str, tuple[Part, ...]] = {
    "chat": (Part(1, (8, 96), (4, 24)),),
    "mixed": (Part(0.8, (8, 48), (4, 16)), Part(0.2, (256, 512), (4, 16))),
    "prefix": (Part(1, (8, 48), (4, 16), prefix_tokens=96, num_families=3),),
}
#: No request of a mix is longer.
MAX_MODEL_LEN = 600
#: Requests that are there at once, to see how many a second are served then.
NUM_BURST = 24
WARM_UP_TOKENS = 4


def draw_workload(mix: Sequence[Part], *, rate: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals at so many requests a second, for so long."""
    draw = random_stream(seed, "workload")
    weights = numpy.array([part.weight for part in mix])
    requests: list[WorkloadRequest] = []
    now_s, next_name = 0.0, 1_000
    while (now_s := now_s + float(draw.exponential(1 / rate))) < seconds or not requests:
        part = mix[int(draw.choice(len(mix), p=weights / weights.sum()))]
        own = int(draw.integers(*part.prompt, endpoint=True))
        output = int(draw.integers(*part.output, endpoint=True))
        num_shared = part.prefix_tokens // BLOCK_SIZE
        family = int(draw.integers(part.num_families))
        num_own = (part.prefix_tokens + own) // BLOCK_SIZE - num_shared
        blocks = [1 + family * num_shared + index for index in range(num_shared)]
        blocks += range(next_name, next_name + num_own)
        next_name += num_own
        arrival = Arrived(
            prompt_tokens=part.prefix_tokens + own,
            max_tokens=output,
            blocks=blocks,
            scheduling=SchedulingParams(model=""),
        )
        requests.append(
            WorkloadRequest(arrival=arrival, arrival_ns=int(now_s * 1e9), outputs=[SequenceOutput(num_tokens=output)])
        )
    return Workload(source="drawn", requests=requests, block_size=BLOCK_SIZE, first_free_name=next_name)


def burst(workload: Workload, num_requests: int) -> Workload:
    """Its first requests, all at once."""
    requests = [
        WorkloadRequest(arrival=request.arrival, arrival_ns=0, outputs=request.outputs)
        for request in workload.requests[:num_requests]
    ]
    return Workload(source="burst", requests=requests, block_size=BLOCK_SIZE, first_free_name=workload.first_free_name)


class Prompts:
    """Makes prompts of random ordinary tokens."""

    def __init__(self, composed: Composition, seed: int) -> None:
        tokenizer = composed.tokenizer
        self._seed = seed
        self._ordinary = [token for token in range(composed.vocab_size) if tokenizer.token_bytes(token)]

    def make(self, request: WorkloadRequest, index: int) -> list[int]:
        """The prompt of the request at this place of its workload."""
        arrival = request.arrival
        tokens: list[int] = []
        for name in arrival.blocks:
            tokens += self._draw(BLOCK_SIZE, "block", name)
        return tokens + self._draw(arrival.prompt_tokens - len(tokens), "tail", index)

    def _draw(self, num_tokens: int, *name: str | int) -> list[int]:
        places = random_stream(self._seed, *name).integers(len(self._ordinary), size=num_tokens)
        return [self._ordinary[place] for place in places]


class Run(NamedTuple):
    """A run's trace folder, and how long its requests took in all."""

    folder: Path
    duration_s: float


def run_workload(
    workload: Workload, folder: Path | str, *, seed: int = 0, warm_up: bool = False, **options: Any
) -> Run:
    """Serve a workload with an engine of its own and record it in a folder. `options` are of the configuration.

    warm_up: a request goes before, so that none of the workload pays for a worker's first step. It is in the record.
    """
    return uvloop.run(_run(workload, folder, seed, options, warm_up=warm_up))


async def _run(workload: Workload, folder: Path | str, seed: int, options: dict[str, Any], *, warm_up: bool) -> Run:
    config = load_config(None, {"record": str(folder), "block_size": BLOCK_SIZE} | options, environment={})
    composed = compose(config)
    engine = composed.engine
    prompts = Prompts(composed, seed)
    made = [prompts.make(request, index) for index, request in enumerate(workload.requests)]
    await engine.start()
    try:
        if warm_up:
            # Backwards, so that it shares no blocks.
            await _serve(engine, made[0][::-1], WARM_UP_TOKENS, seed=len(made))
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def serve(index: int) -> None:
            request = workload.requests[index]
            await asyncio.sleep(max(request.arrival_ns / 1e9 - (loop.time() - began_s), 0))
            await _serve(engine, made[index], request.arrival.max_tokens, seed=index)

        await asyncio.gather(*(serve(index) for index in range(len(made))))
        duration_s = loop.time() - began_s
    finally:
        await engine.stop()
    assert engine.run_folder is not None
    return Run(engine.run_folder, duration_s)


async def _serve(engine: InferenceEngine, prompt: list[int], max_tokens: int, *, seed: int) -> None:
    now_ns = engine.now_ns()
    request = Request(
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, seed=seed),
        scheduling=SchedulingParams(model=engine.model_names[0], received_ns=now_ns, ready_ns=now_ns),
    )
    (handle,) = await engine.submit([request])
    async for _ in handle:
        pass


class Capacity(NamedTuple):
    """Requests that an engine serves a second when many are there at once, and the coefficients of its predictor, which
    other runs can be given so that all of them schedule by the same times.
    """

    rate: float
    predictor: list[int]


def capacity(mix: Sequence[Part], folder: Path | str, **options: Any) -> Capacity:
    """Serve some requests of a mix at once."""
    workload = burst(draw_workload(mix, rate=1000, seconds=1, seed=7), NUM_BURST)
    run = run_workload(workload, folder, warm_up=True, **options)
    with LogReader(run.folder / "trace.jsonl") as log:
        return Capacity(NUM_BURST / run.duration_s, log.header.predictor)
