"""What operators ask of backends, of an engine with one model and of one with several."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from eventlm.config.backends import BackendSpec
from eventlm.engine.admin import ReadStatus
from eventlm.engine.backends.actions import (
    AddBackend,
    BackendAction,
    DrainBackend,
    ListBackends,
    RemoveBackend,
    ResumeBackend,
)
from eventlm.engine.backends.backend_set import BackendStatus, UnknownBackendError
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.errors import UsageError
from tests.engine.backends.engines import ask, forwarded_request, running_backends, submit
from tests.engine.backends.fake_backend import silent_after
from tests.engine.engines import running
from tests.processes import until

B = BackendSpec(url="http://b:2", key="sk-secret", max_concurrency=3, weight=2)


async def do(engine: InferenceEngine, action: BackendAction) -> list[BackendStatus]:
    found = (await engine.administer(action)).backends
    assert found is not UNSET
    return found


async def test_the_whole_life_of_a_backend() -> None:
    async with running_backends("a:1", limit=1) as (engine, backends):
        backends["a:1"].answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        [a] = await do(engine, ListBackends())
        assert a == BackendStatus(
            name="a:1", model="m", replica=0, kind="openai", state="up", num_requests=1, limit=1, num_waiting=-1,
            weight=1.0, num_failures=0, problem="",
        )  # fmt: skip
        before, b = await do(engine, AddBackend(spec=B))
        assert before == a
        assert (b.name, b.replica, b.state, b.limit, b.weight, b.num_requests) == ("b:2", 1, "up", 3, 2.0, 0)
        await ask(engine, forwarded_request())
        assert len(backends["b:2"].attempts) == 1
        assert [each.state for each in await do(engine, DrainBackend(name="b:2"))] == ["up", "drained"]
        assert [each.state for each in await do(engine, ResumeBackend(name="b:2"))] == ["up", "up"]
        assert [each.state for each in await do(engine, RemoveBackend(name="a:1"))] == ["leaving", "up"]
        with pytest.raises(UsageError, match="a:1 has been removed"):
            await do(engine, ResumeBackend(name="a:1"))
        await do(engine, RemoveBackend(name="a:1"))
        reader.handle.cancel()
        await until(lambda: backends["a:1"].is_closed)
        assert [each.name for each in await do(engine, ListBackends())] == ["b:2"]
        status = await engine.administer(ReadStatus())
        assert status.backends == [b]
        # Only those with workers are listed as replicas.
        assert status.replicas == []


async def test_one_that_does_not_answer_says_why() -> None:
    async with running_backends("a:1") as (engine, backends):
        backends.connect(B)
        backends["b:2"].facts = structs.replace(backends["b:2"].facts, server_id=engine.server_id)
        [_, b] = await do(engine, AddBackend(spec=B))
        assert (b.state, b.problem) == ("down", "b:2 is this server itself; leave it out")


async def test_mistakes_are_one_line() -> None:
    async with running_backends("a:1") as (engine, _):
        for action, message in (
            (AddBackend(spec=BackendSpec(url="http://a:1")), "the backend a:1 is there already"),
            (AddBackend(spec=B, model="x"), "the model 'x' has no backends; those that have are m"),
        ):
            with pytest.raises(UsageError) as caught:
                await do(engine, action)
            assert str(caught.value) == message
        with pytest.raises(UnknownBackendError, match="no backend 'c:3'"):
            await do(engine, DrainBackend(name="c:3"))
    async with running() as engine:
        assert await do(engine, ListBackends()) == []
        for action in (AddBackend(spec=B), RemoveBackend(name="b:2")):
            with pytest.raises(UsageError, match="no model of this server has backends"):
                await do(engine, action)
