"""Engines over backends in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.config import Config, RecordConfig, SchedulerConfig
from eventlm.config.backends import BackendSpec
from eventlm.config.structs import GatewayConfig
from eventlm.engine.backend import ForwardedRequest
from eventlm.engine.backends.backend_set import BackendStatus
from eventlm.engine.backends.setup import FoundBackend, make_backends_setup
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import FinishedOutput, Request, RequestHandle, TextOutput
from eventlm.system.system import real_system
from tests.engine.backends.fake_backend import FakeBackends
from tests.engine.engines import request
from tests.processes import PATIENCE_SECONDS

#: Waits that tests can afford.
QUICK = {"backend": ["http://a:1"], "retry_backoff_ms": 1, "probe_interval_ms": 10, "max_failures": 3}


@asynccontextmanager
async def running_backends(
    *names: str,
    record: Path | None = None,
    recover: Path | None = None,
    limit: int = 0,
    models: Sequence[str] = (),
    scheduler: dict[str, Any] | None = None,
    **gateway: Any,
) -> AsyncIterator[tuple[InferenceEngine, FakeBackends]]:
    """An engine of these backends (`a:1` unless given), started, and stopped in the end."""
    backends = FakeBackends()
    config = Config(
        gateway=GatewayConfig(**(QUICK | gateway)),
        scheduler=SchedulerConfig(**(scheduler or {})),
        record=RecordConfig(record=str(record or ""), recover=str(recover or ""), validate_every=1),
    )
    specs = [BackendSpec(url=f"http://{name}", max_concurrency=limit) for name in names or ("a:1",)]
    setup = make_backends_setup(
        config, [FoundBackend(spec, None) for spec in specs], model_name="m", models=models, connect=backends.connect
    )
    engine = InferenceEngine(setup, real_system())
    try:
        await engine.start()
        yield engine, backends
    finally:
        await engine.stop()


def forwarded_request(text: str = "hello", *, n: int = 1, seed: int = 5, **changes: Any) -> Request:
    """A completion that is forwarded."""
    body = ForwardedRequest(endpoint="completions", body=b'{"prompt": "%s", "max_tokens": 12}' % text.encode())
    return structs.replace(request(n=n, seed=seed, **changes), forwarded=body)


class TextReader:
    """Reads a handle in a task of its own: texts of each sequence, and their ends."""

    def __init__(self, handle: RequestHandle, *, n: int = 1) -> None:
        self.handle = handle
        self.texts = [""] * n
        self.finished: list[FinishedOutput | None] = [None] * n
        self.progress = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> TextReader:
        num_tokens = [0] * len(self.texts)
        async for output in self.handle:
            if isinstance(output, TextOutput):
                assert output.start == num_tokens[output.index]
                num_tokens[output.index] += max(output.delta.num_tokens, not output.start)
                self.texts[output.index] += output.delta.text
            else:
                assert isinstance(output, FinishedOutput)
                self.finished[output.index] = output
            self.progress.set()
        return self

    async def until(self, text: str) -> None:
        """Wait until the first sequence has this text."""
        while self.texts[0] != text:
            self.progress.clear()
            await asyncio.wait_for(self.progress.wait(), PATIENCE_SECONDS)

    async def done(self) -> TextReader:
        """Wait for the end, or raise what ended it."""
        return await asyncio.wait_for(self.task, PATIENCE_SECONDS)

    @property
    def reasons(self) -> list[str]:
        return [each.reason if each else "" for each in self.finished]


async def submit(engine: InferenceEngine, request: Request) -> TextReader:
    """Submit one request and read it."""
    [handle] = await engine.submit([request])
    return TextReader(handle, n=request.n)


async def ask(engine: InferenceEngine, request: Request) -> TextReader:
    """Submit one request and read it to its end."""
    return await (await submit(engine, request)).done()


def status(engine: InferenceEngine) -> list[BackendStatus]:
    """What operators see of the backends of the engine's first set."""
    return engine._backends.sets[0].status(engine._require_engine_core().core.state)
