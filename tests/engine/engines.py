"""Engines over real fake workers, for tests of the asynchronous half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from eventlm.bus.log_reader import LogReader
from eventlm.config import Config, ModelConfig, ParallelConfig, RecordConfig, SchedulerConfig, WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import (
    ClosingOutput,
    FinishedOutput,
    Request,
    RequestHandle,
    TokensOutput,
)
from eventlm.engine.setup import EngineSetup, make_setup
from eventlm.events import Event
from eventlm.events.codec import decode_body
from eventlm.replay.verify.verifier import VerifyResult, verify
from eventlm.sampling_params import SamplingParams
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import fake_token
from tests.made_requests import make_request
from tests.processes import PATIENCE_SECONDS

BLOCK_SIZE = 16
#: Steps short enough for tests and long enough to be caught in the middle.
FAKE = {"base_ns": 2_000_000, "decode_ns": 0, "prefill_token_ns": 0, "context_token_ns": 0}

SLOW = {"base_ns": 20_000_000}


def fake_setup(
    *,
    record: Path | None = None,
    fake: dict[str, Any] | None = None,
    worker: WorkerConfig | None = None,
    parallel: ParallelConfig | None = None,
    **scheduler: Any,
) -> EngineSetup:
    """An engine's setup with the fake model, 64 blocks and a context of 512."""
    config = Config(
        model=ModelConfig(model="fake", fake=FAKE | (fake or {})),
        scheduler=SchedulerConfig(**scheduler),
        worker=worker or WorkerConfig(),
        parallel=parallel or ParallelConfig(),
        record=RecordConfig(record=str(record) if record is not None else "", validate_every=1),
    )
    return make_setup(config, model="fake", model_name="m", num_blocks=64, max_model_len=512)


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[InferenceEngine]:
    """An engine of `fake_setup(**changes)`, started, and stopped in the end."""
    engine = InferenceEngine(fake_setup(**changes), real_system())
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def request(
    max_tokens: int = 12, *, prompt: Sequence[int] = (1, 2, 3), seed: int = 5, n: int = 1, **changes: Any
) -> Request:
    """A request for the fake model."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, n=n)
    return make_request(list(prompt), params, **changes)


def expected_tokens(seed: int, index: int, num_tokens: int) -> list[int]:
    """What the fake worker says whatever happens to it."""
    return [fake_token(seed, index, position) for position in range(num_tokens)]


class Reader:
    """Reads a handle in a task of its own, as an edge does: answers each closing, keeps what it got."""

    def __init__(self, handle: RequestHandle, *, n: int = 1) -> None:
        self.handle = handle
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finished: list[FinishedOutput | None] = [None] * n
        self.closings: list[ClosingOutput] = []
        self.progress = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Reader:
        async for output in self.handle:
            if isinstance(output, TokensOutput):
                assert output.start == len(self.tokens[output.index])
                self.tokens[output.index] += output.token_ids
            elif isinstance(output, ClosingOutput):
                self.closings.append(output)
                self.handle.text_ended(output.index, output.position)
            else:
                self.finished[output.index] = output
            self.progress.set()
        return self

    async def until_tokens(self, num_tokens: int) -> None:
        """Wait until the first sequence has so many tokens."""
        while len(self.tokens[0]) < num_tokens:
            self.progress.clear()
            await asyncio.wait_for(self.progress.wait(), PATIENCE_SECONDS)

    async def done(self) -> Reader:
        """Wait for the end, or raise what ended it."""
        return await asyncio.wait_for(self.task, PATIENCE_SECONDS)

    @property
    def reasons(self) -> list[str]:
        return [each.reason if each else "" for each in self.finished]


async def generate(engine: InferenceEngine, *group: Request) -> list[Reader]:
    """Submit a group and read it to its end."""
    handles = await engine.submit(group)
    readers = [Reader(handle, n=member.n) for handle, member in zip(handles, group, strict=True)]
    return [await reader.done() for reader in readers]


def recorded(engine: InferenceEngine) -> list[Event]:
    """The events of the run's trace."""
    assert engine.run_folder is not None
    with LogReader(engine.run_folder / "trace.jsonl") as lines:
        return [decode_body(line.body) for line in lines]


def verified(engine: InferenceEngine) -> VerifyResult:
    """What its verification says; fails at a divergence."""
    assert engine.run_folder is not None
    result = verify(engine.run_folder / "trace.jsonl")
    assert result.divergence is None
    return result
