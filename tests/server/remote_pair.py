"""A remote engine and the engine's end of its connection, over a real socket pair, before an engine double."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from eventlm.config import Config
from eventlm.engine.request import FinishedOutput, Request, RequestHandle, TokensOutput
from eventlm.frontend.link import FrontEndLink
from eventlm.frontend.protocol import FrontEndSetup, Outputs, decode_to_front_end, encode
from eventlm.frontend.remote_engine import RemoteEngine
from eventlm.metrics.components import FrontEndMetrics
from eventlm.sampling_params import SamplingParams
from eventlm.system.clock import SystemClock
from eventlm.system.frames import FrameConnection
from tests.made_requests import make_request
from tests.processes import PATIENCE_SECONDS
from tests.server.engine_double import EngineDouble, spell

FIGURES = [FrontEndMetrics(index=3, is_up=True, num_restarts=0)]
SETUP = FrontEndSetup(
    index=3,
    config=Config(),
    model="fake",
    model_names=["test"],
    max_model_len=256,
    vocab_size=512,
    origin_ns=0,
    created=1,
    state="ready",
)


class Pair:
    """Both ends. `frames` are the messages with outputs that the front end got."""

    def __init__(self, double: EngineDouble, **limits: Any) -> None:
        self.double = double
        self.link = FrontEndLink(3, double, lambda: FIGURES, **limits)  # type: ignore[arg-type]
        self.frames: list[Outputs] = []

    async def open(self) -> Pair:
        ours, theirs = socket.socketpair()
        await self.link.open(ours)
        self.connection = await FrameConnection.open(
            theirs, self._receive, lambda: self.engine.fail("the engine's process has died")
        )
        self.engine = RemoteEngine(SETUP, lambda message: self.connection.send(encode(message)), SystemClock())
        return self

    def _receive(self, body: bytes) -> None:
        message = decode_to_front_end(body)
        if isinstance(message, Outputs):
            self.frames.append(message)
        self.engine.take(message)  # type: ignore[arg-type]


@asynccontextmanager
async def connected(text: str = "Hello, world", **limits: Any) -> AsyncIterator[Pair]:
    pair = await Pair(EngineDouble(spell(text)), **limits).open()
    async with asyncio.timeout(PATIENCE_SECONDS):
        yield pair
    pair.link.lose("over")
    pair.connection.abort()


def request(**fields: Any) -> Request:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 64), n=fields.pop("n", 1), stop=fields.pop("stop", []))
    return make_request([72, 105], params, **{"model": "test"} | fields)


def assert_tidy(pair: Pair) -> None:
    assert not pair.engine._streams
    assert not pair.engine._calls
    assert not pair.link._answering


async def read(handle: RequestHandle) -> tuple[bytes, list[str]]:
    tokens, reasons = [], []
    async for output in handle:
        if isinstance(output, TokensOutput):
            tokens += output.token_ids
        elif isinstance(output, FinishedOutput):
            reasons.append(output.reason)
    return bytes(tokens), reasons


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
