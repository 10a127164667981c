"""Backends that come and go while an engine runs."""

from __future__ import annotations

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import BackendFacts
from eventlm.engine.backends.backend_set import UnknownBackendError
from eventlm.errors import UsageError
from tests.engine.backends.engines import ask, forwarded_request, running_backends, status, submit
from tests.engine.backends.fake_backend import WORDS, silent_after, three_words
from tests.processes import until

A, B, C = (BackendSpec(url=f"http://{name}") for name in ("a:1", "b:2", "c:3"))


async def test_one_that_is_added_gets_requests() -> None:
    async with running_backends("a:1", limit=1) as (engine, backends):
        backends["a:1"].answer = silent_after(1)
        first = await submit(engine, forwarded_request())
        await first.until("one ")
        await engine._backends.sets[0].add(B)
        assert (await ask(engine, forwarded_request())).texts == ["".join(WORDS)]
        assert len(backends["b:2"].attempts) == 1


async def test_a_removed_one_answers_what_it_has_and_leaves_its_replica_to_another() -> None:
    async with running_backends("a:1", "b:2", max_backends=2) as (engine, backends):
        own, a = engine._backends.sets[0], backends["a:1"]
        a.answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        own.remove("a:1")
        with pytest.raises(UsageError, match="c:3 has no room: there are 2; raise --max-backends"):
            await own.add(C)
        assert [(each.name, each.state) for each in status(engine)] == [("a:1", "leaving"), ("b:2", "up")]
        assert not a.is_closed
        reader.handle.cancel()
        await until(lambda: a.is_closed and len(own.specs) == 1)
        await own.add(C)
        assert [(each.name, each.replica, each.state) for each in status(engine)] == [
            ("c:3", 0, "up"),
            ("b:2", 1, "up"),
        ]
        for _ in range(2):
            await ask(engine, forwarded_request())
        assert len(backends["c:3"].attempts) == 2


async def test_a_drained_one_gets_nothing_until_it_is_wanted_again() -> None:
    async with running_backends("a:1", "b:2") as (engine, backends):
        own = engine._backends.sets[0]
        own.drain("a:1", drains=True)
        for _ in range(3):
            await ask(engine, forwarded_request())
        assert not backends["a:1"].attempts
        own.drain("a:1", drains=False)
        await ask(engine, forwarded_request())
        assert len(backends["a:1"].attempts) == 1


async def test_a_list_is_followed_and_what_others_added_stays() -> None:
    async with running_backends("a:1") as (engine, _):
        own = engine._backends.sets[0]
        known = await own.follow([A, B], [A])
        assert known == [A, B]
        await own.add(C)
        assert await own.follow([A], known) == [A]
        await until(lambda: own.specs == [A, C])


async def test_one_that_is_back_on_a_list_before_it_has_left_stays() -> None:
    async with running_backends("a:1", limit=1) as (engine, backends):
        own, a = engine._backends.sets[0], backends["a:1"]
        a.answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        specs = own.specs
        known = await own.follow([], specs)
        assert [each.state for each in status(engine)] == ["leaving"]
        # With another weight it has to leave first.
        assert await own.follow([structs.replace(specs[0], weight=2)], known) == []
        assert await own.follow(specs, known) == specs
        a.answer = three_words
        reader.handle.cancel()
        assert (await ask(engine, forwarded_request())).texts == ["".join(WORDS)]
        assert [each.state for each in status(engine)] == ["up"]


async def test_one_without_room_is_added_once_there_is_some() -> None:
    async with running_backends("a:1", max_backends=1) as (engine, backends):
        own, a = engine._backends.sets[0], backends["a:1"]
        a.answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        with capture_logs() as logs:
            known = await own.follow([B], [A])
            known = await own.follow([B], known)
        assert known == []
        assert [each["log_level"] for each in logs if each["event"] == "a backend could not be added"] == [
            "warning",
            "debug",
        ]
        reader.handle.cancel()
        await until(lambda: not own.specs)
        assert await own.follow([B], known) == [B]
        assert [(each.name, each.state) for each in status(engine)] == [("b:2", "up")]


async def test_names_are_checked() -> None:
    async with running_backends("a:1") as (engine, _):
        own = engine._backends.sets[0]
        with pytest.raises(UsageError, match="a:1 is there already"):
            await own.add(A)
        own.remove("a:1")
        with pytest.raises(UsageError, match="has been removed"):
            own.drain("a:1", drains=False)
        with pytest.raises(UnknownBackendError, match=r"there is no backend 'a:2'; did you mean a:1\?"):
            own.remove("a:2")


async def test_one_that_comes_later_must_serve_the_model() -> None:
    async with running_backends("a:1", models=["m"]) as (engine, backends):
        own = engine._backends.sets[0]
        answers = {
            "b:2": BackendFacts(kind="vllm", models=["x"]),
            "c:3": BackendFacts(kind="vllm", models=["x", "m"]),
        }
        for name, facts in answers.items():
            spec = BackendSpec(url=f"http://{name}")
            backends.connect(spec)
            backends[name].facts = facts
            await own.add(spec)
        problems = {each.name: each.problem for each in status(engine)}
        assert problems == {"a:1": "", "b:2": "it serves x, and the others here m", "c:3": ""}
