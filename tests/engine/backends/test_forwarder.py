"""An engine whose replicas are other servers: nothing is lost or doubled, whatever they do."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.engine.backend import AnswerUsage, BackendError, BackendLoad
from eventlm.engine.request import RequestFieldError
from eventlm.events import (
    BackendDown,
    BackendState,
    BackendUp,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Recovered,
)
from tests.engine.backends.engines import TextReader, ask, forwarded_request, running_backends, status, submit
from tests.engine.backends.fake_backend import WORDS, failing, silent_after
from tests.engine.engines import recorded, verified
from tests.processes import until

WHOLE = "".join(WORDS)


async def test_every_choice_is_a_request_of_its_own_with_its_own_seed(tmp_path: Path) -> None:
    async with running_backends("a:1", "b:2", record=tmp_path) as (engine, backends):
        reader = await ask(engine, forwarded_request(n=3, seed=5))
        assert reader.texts == [WHOLE] * 3
        assert reader.reasons == ["stop"] * 3
        sent = [attempt for name in ("a:1", "b:2") for attempt in backends[name].attempts]
        assert sorted(attempt.seed for attempt in sent) == [5, 6, 7]
        assert {attempt.request.body for attempt in sent} == {b'{"prompt": "hello", "max_tokens": 12}'}
        assert len({attempt.request_id for attempt in sent}) == 3
        finished = reader.finished[0]
        assert finished is not None
        assert (finished.usage, finished.position, finished.cached_tokens) == (AnswerUsage(7, 3, 2), 3, 2)
        assert engine.models["m"].is_available
    verified(engine)
    events = recorded(engine)
    assert [event.reason for event in events if isinstance(event, ForwardEnded)] == ["stop"] * 3
    assert all(backend.is_closed for backend in backends.by_name.values())


async def test_an_engine_that_goes_on_with_a_run_has_its_backends(tmp_path: Path) -> None:
    folders = {"record": tmp_path / "runs", "recover": tmp_path / "spool"}
    async with running_backends("a:1", **folders) as (first, _):
        await ask(first, forwarded_request())
        # It leaves everything as it is, as a killed process would.
        first._broken, first.state = True, "dead"
    async with running_backends("a:1", **folders) as (second, _):
        assert (await ask(second, forwarded_request())).texts == [WHOLE]
    assert second.run_folder == first.run_folder
    assert second.run_folder is not None
    with LogReader(second.run_folder) as reader:
        epochs = [event.epoch for line in reader if isinstance(event := line.event(), BackendUp)]
    assert epochs[0] < epochs[1]


async def test_what_fails_before_any_text_is_tried_elsewhere(tmp_path: Path) -> None:
    async with running_backends("a:1", "b:2", record=tmp_path) as (engine, backends):
        backends["a:1"].answer = failing(BackendError("down for repairs", "overloaded", status=503))
        reader = await ask(engine, forwarded_request())
        assert reader.texts == [WHOLE]
        assert len(backends["a:1"].attempts) == len(backends["b:2"].attempts) == 1
    verified(engine)
    [failed] = [event for event in recorded(engine) if isinstance(event, ForwardFailed)]
    assert (failed.kind, failed.status) == ("overloaded", 503)


async def test_a_broken_answer_goes_on_where_another_backend_can(tmp_path: Path) -> None:
    async with running_backends("a:1", "b:2", record=tmp_path) as (engine, backends):
        backends["a:1"].answer = failing(BackendError("reset", "broken"), after=2)
        reader = await ask(engine, forwarded_request())
        assert reader.texts == [WHOLE]
        [second] = backends["b:2"].attempts
        assert (second.text, second.num_tokens) == ("one two ", 2)
        finished = reader.finished[0]
        assert finished is not None
        assert finished.position == 3
    verified(engine)


async def test_a_broken_answer_ends_with_an_error_where_none_can() -> None:
    async with running_backends("a:1", "b:2") as (engine, backends):
        backends["a:1"].answer = failing(BackendError("reset", "broken"), after=2)
        for backend in backends.by_name.values():
            backend.continues = False
        reader = await ask(engine, forwarded_request())
        finished = reader.finished[0]
        assert finished is not None
        assert (reader.texts, finished.reason, finished.position) == (["one two "], "error", 2)
        assert finished.failure is not None
        assert (finished.failure.kind, finished.failure.message) == ("broken", "reset")
        assert not backends["b:2"].attempts


@pytest.mark.parametrize("continues", [True, False])
async def test_an_answer_that_the_engine_before_had_begun_goes_on_where_a_backend_can(
    tmp_path: Path, continues: bool
) -> None:
    async with running_backends("a:1", record=tmp_path) as (engine, backends):
        a = backends["a:1"]
        a.continues = continues
        a.answers.append(silent_after(2))
        reader = await submit(engine, forwarded_request())
        await reader.until("one two ")
        engine.put_fact(Recovered(reason="killed"))
        engine.put_fact(BackendUp(replica=0, epoch=2, name="a:1"))
        await reader.done()
        assert reader.texts == [WHOLE if continues else "one two "]
        assert reader.reasons == ["stop" if continues else "error"]
        assert len(a.attempts) == 1 + continues
    verified(engine)


async def test_a_request_that_no_backend_takes_fails_with_the_backend_s_words() -> None:
    async with running_backends("a:1", "b:2") as (engine, backends):
        error = BackendError("no such parameter", "refused", status=400, param="x", code="bad")
        for backend in backends.by_name.values():
            backend.answer = failing(error)
        reader = await ask(engine, forwarded_request())
        finished = reader.finished[0]
        assert finished is not None
        assert finished.failure == error.failure
        assert sum(len(backend.attempts) for backend in backends.by_name.values()) == 1


async def test_a_client_that_leaves_ends_its_request_at_the_backend() -> None:
    async with running_backends() as (engine, backends):
        backends["a:1"].answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        reader.handle.cancel()
        await reader.done()
        assert reader.reasons == ["cancelled"]
        await until(lambda: not backends["a:1"].num_open)


async def test_a_backend_that_fails_in_a_row_is_left_alone_until_it_answers_a_probe(tmp_path: Path) -> None:
    async with running_backends("a:1", "b:2", record=tmp_path, forward_retries=5) as (engine, backends):
        a = backends["a:1"]
        a.answer = failing(BackendError("no route", "connect"))
        a.error = BackendError("no route", "connect")
        for _ in range(8):
            assert (await ask(engine, forwarded_request())).texts == [WHOLE]
        assert len(a.attempts) <= 3
        await until(lambda: any(each.state != "up" for each in status(engine)))
        asked = a.num_asked
        await until(lambda: a.num_asked > asked + 1)
        a.answer, a.error = backends["b:2"].answer, None
        await until(lambda: all(each.state == "up" for each in status(engine)))
        before = len(a.attempts)
        readers = [await submit(engine, forwarded_request()) for _ in range(4)]
        assert [(await each.done()).texts for each in readers] == [[WHOLE]] * 4
        assert len(a.attempts) > before
    verified(engine)
    events = recorded(engine)
    ups = [(event.replica, event.epoch) for event in events if isinstance(event, BackendUp)]
    assert ups == [(0, 1), (1, 1), (0, 2)]
    [down] = [event for event in events if isinstance(event, BackendDown)]
    assert down.replica == 0
    assert "in a row" in down.reason


async def test_one_that_does_not_answer_at_the_start_is_probed() -> None:
    async with running_backends("a:1") as (engine, backends):
        assert engine.has_worker
        a = backends["a:1"]
        a.error = BackendError("no route", "connect")
        await until(lambda: not engine.has_worker)
        reader = await submit(engine, forwarded_request())
        await asyncio.sleep(0.02)
        assert not a.attempts
        a.error = None
        assert (await reader.done()).texts == [WHOLE]


async def test_what_its_metrics_say_is_in_the_log(tmp_path: Path) -> None:
    async with running_backends("a:1", record=tmp_path) as (engine, backends):
        backends["a:1"].load = BackendLoad(running=3, waiting=0, kv_used_ppm=250_000)
        replica = engine._require_engine_core().core.state.replicas[0]
        await until(lambda: replica.capacity is not None and replica.capacity.running == 3)
    assert any(isinstance(event, BackendState) and event.running == 3 for event in recorded(engine))
    verified(engine)


async def test_a_request_without_what_is_forwarded_is_refused_and_the_others_go_on() -> None:
    async with running_backends("a:1") as (engine, _):
        with pytest.raises(RequestFieldError, match="'forwarded': it must be given for a model that other servers run"):
            await engine.submit([structs.replace(forwarded_request(), forwarded=None)])
        assert (await ask(engine, forwarded_request())).reasons == ["stop"]


async def test_the_more_urgent_goes_first_where_there_is_no_room() -> None:
    async with running_backends(limit=1, scheduler={"policy": {"type": "edf"}}) as (engine, backends):
        a = backends["a:1"]
        a.answers = [silent_after(1)]
        first = await submit(engine, forwarded_request("first"))
        await first.until("one ")
        late = await submit(engine, forwarded_request("late"))
        urgent = await submit(engine, forwarded_request("urgent", deadline_ns=1_000_000))
        first.handle.cancel()
        await urgent.done()
        await late.done()
        assert [attempt.request.body[12:16] for attempt in a.attempts] == [b"firs", b"urge", b"late"]


async def test_a_stop_ends_what_runs_at_backends(tmp_path: Path) -> None:
    async with running_backends(record=tmp_path) as (engine, backends):
        backends["a:1"].answer = silent_after(1)
        reader = await submit(engine, forwarded_request())
        await reader.until("one ")
        await engine.stop()
        assert (await reader.done()).reasons == ["cancelled"]
        assert not backends["a:1"].num_open
    verified(engine)


@pytest.mark.parametrize("seed", range(2))
async def test_random_failures_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    names = ("a:1", "b:2", "c:3")
    async with running_backends(
        *names, record=tmp_path, limit=4, forward_retries=8, retry_budget_percent=100, max_failures=1000
    ) as (engine, backends):
        kinds = ("connect", "timeout", "broken", "overloaded", "server", "protocol")
        for backend in backends.by_name.values():
            whole = backend.answer
            backend.answers = [
                failing(BackendError("x", chance.choice(kinds)), after=chance.randint(0, 2))
                if chance.random() < 0.3
                else whole
                for _ in range(60)
            ]
        readers: list[TextReader] = []
        for number in range(40):
            readers.append(await submit(engine, forwarded_request(f"r{number}")))
            if chance.random() < 0.3:
                await asyncio.sleep(0.001)
        left = chance.sample(readers, 4)
        for reader in left:
            reader.handle.cancel()
        for reader in readers:
            await reader.done()
            assert WHOLE.startswith(reader.texts[0])
            if reader.reasons != ["cancelled"]:
                assert (reader.texts, reader.reasons) == ([WHOLE], ["stop"])
        await until(lambda: not any(backend.num_open for backend in backends.by_name.values()))
    verified(engine)
    events = recorded(engine)
    assert len([event for event in events if isinstance(event, Finished)]) == 40
    most = max(event.running for event in events if isinstance(event, Forwarded))
    assert most <= 4
