"""Requests that give way where their model is busy."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.engine.backend import BackendError
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import ModelBusyError, Request, Submission
from eventlm.scheduling_params import LOWEST_PRIORITY
from tests.engine.backends.engines import TextReader, forwarded_request, running_backends, status
from tests.engine.backends.fake_backend import silent_after
from tests.processes import until

NEVER, IF_DOWN, IF_LATE = -1, 0, 1


async def submit(engine: InferenceEngine, gives_way_ns: int, request: Request | None = None) -> TextReader:
    submission = Submission(reply_id="cmpl-1", gives_way_ns=gives_way_ns)
    [handle] = await engine.submit([request or forwarded_request()], submission=submission)
    return TextReader(handle)


async def test_while_no_backend_is_up() -> None:
    async with running_backends("a:1") as (engine, backends):
        await (await submit(engine, IF_DOWN)).done()
        backends["a:1"].error = BackendError("gone", "connect")
        await until(lambda: status(engine)[0].state == "down")
        for gives_way_ns in (IF_DOWN, IF_LATE):
            with pytest.raises(ModelBusyError, match="no replica of the model 'm' is up"):
                await submit(engine, gives_way_ns)
        waiting = await submit(engine, NEVER)
        backends["a:1"].error = None
        assert (await waiting.done()).reasons == ["stop"]


async def test_while_requests_wait_for_too_long() -> None:
    async with running_backends("a:1", limit=1) as (engine, backends):
        backends["a:1"].answer = silent_after(1)
        first = await submit(engine, IF_LATE)
        await first.until("one ")
        # What goes after everything else may wait.
        last = forwarded_request()
        last = structs.replace(last, scheduling=structs.replace(last.scheduling, priority=LOWEST_PRIORITY))
        readers = [first, await submit(engine, NEVER, last), await submit(engine, IF_LATE)]
        with pytest.raises(ModelBusyError, match=r"requests for the model 'm' wait for \d+ ms"):
            await submit(engine, IF_LATE)
        readers += [await submit(engine, IF_DOWN), await submit(engine, 10**15)]
        for reader in readers:
            reader.handle.cancel()
            await reader.done()
