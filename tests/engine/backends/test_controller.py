"""One backend: what its answers and its troubles make of facts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import ContextVar

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import AnswerDelta, AnswerEnd, Attempt, AttemptId, BackendError, BackendFacts, BackendLoad
from eventlm.engine.backends.controller import BackendController, Probing, WhyNot
from eventlm.events import BackendDown, BackendState, BackendUp, Fact
from tests.engine.backends.engines import forwarded_request
from tests.engine.backends.fake_backend import FakeBackend, failing, silent_after
from tests.processes import until

CALLER = ContextVar("caller", default="")
NAME = AttemptId(1, 0, 1)
FORWARDED = forwarded_request().forwarded
assert FORWARDED is not None
ATTEMPT = Attempt(request=FORWARDED, seed=1, request_id="r", first_seconds=1, silence_seconds=1)


class Owner:
    """Takes down what it is told."""

    server_id = "this"

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.deltas: list[AnswerDelta] = []
        self.ends: list[AnswerEnd] = []
        self.failures: list[BackendError] = []
        self.num_changes = 0

    def now_ns(self) -> int:
        return 0

    def put_fact(self, fact: Fact) -> None:
        self.facts.append(fact)

    def answer_went_on(self, name: AttemptId, delta: AnswerDelta) -> None:
        self.deltas.append(delta)

    def answer_ended(self, name: AttemptId, ended: AnswerEnd) -> None:
        self.ends.append(ended)

    def attempt_failed(self, name: AttemptId, error: BackendError) -> None:
        self.failures.append(error)

    def backends_changed(self) -> None:
        self.num_changes += 1


class Watched:
    """A backend under a controller that probes every few milliseconds."""

    def __init__(
        self, *, interval_seconds: float = 0.005, max_failures: int = 2, why_not: WhyNot = lambda *_: ""
    ) -> None:
        self.backend = FakeBackend(BackendSpec(url="http://a:1", weight=2.5, max_concurrency=7))
        self.owner = Owner()
        probing = Probing(interval_seconds, max_failures)
        self.controller = BackendController(4, self.backend, self.owner, probing, why_not=why_not)

    async def __aenter__(self) -> Watched:
        await self.controller.ask()
        self.controller.run()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.controller.stop()


async def test_one_that_answers_is_up_with_its_limit_and_weight() -> None:
    async with Watched() as watched:
        [up] = watched.owner.facts
        assert up == BackendUp(replica=4, epoch=1, name="a:1", kind="openai", max_concurrency=7, weight_ppm=2_500_000)
        assert watched.owner.num_changes == 1


async def test_the_log_tells_what_is_wanted_of_one_that_is_down() -> None:
    async with Watched(interval_seconds=60, max_failures=1) as watched:
        watched.backend.answer = failing(BackendError("it failed", "server"))
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: not watched.controller.is_up)
        watched.controller.drain(drains=True)
        watched.controller.drain(drains=False)
        watched.controller.drain(drains=True, reason="removed")
        reasons = [fact.reason for fact in watched.owner.facts if isinstance(fact, BackendDown)]
        assert reasons == ["1 failures in a row, the last: server", "drained", "it does not answer", "removed"]


async def test_this_server_itself_is_no_backend() -> None:
    watched = Watched()
    watched.backend.facts = BackendFacts(kind="eventlm", server_id="this")
    async with watched:
        assert watched.controller.problem == "a:1 is this server itself; leave it out"
        assert not watched.controller.is_up


async def test_one_that_does_not_belong_here_stays_down() -> None:
    watched = Watched(why_not=lambda spec, facts: f"{spec.name} is {facts.kind}" if facts.kind == "openai" else "")
    async with watched:
        assert watched.controller.problem == "a:1 is openai"
        assert not watched.owner.facts
        watched.backend.facts = BackendFacts(kind="vllm")
        await until(lambda: watched.controller.is_up)


async def test_an_answer_has_no_context_of_another_request() -> None:
    found: list[str] = []

    async def answer(_: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        found.append(CALLER.get())
        yield AnswerEnd("stop")

    async with Watched() as watched:
        watched.backend.answer = answer
        CALLER.set("another request")
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: watched.owner.ends)
    assert found == [""]


async def test_a_cancelled_request_makes_no_facts() -> None:
    async with Watched() as watched:
        watched.backend.answer = silent_after(1)
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: watched.owner.deltas)
        watched.controller.end(NAME)
        watched.controller.end(NAME)
        await until(lambda: not watched.backend.num_open)
        assert not watched.owner.ends
        assert not watched.owner.failures


async def test_an_answer_without_an_end_is_broken() -> None:
    async def endless(attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        yield AnswerDelta("a", 1)

    async with Watched() as watched:
        watched.backend.answer = endless
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: watched.owner.failures)
        assert watched.owner.failures[0].kind == "broken"


async def test_a_defect_of_ours_fails_the_request_and_no_more() -> None:
    async def defective(attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        raise ZeroDivisionError
        yield

    async with Watched() as watched:
        watched.backend.answers = [defective]
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: watched.owner.failures)
        assert str(watched.owner.failures[0]) == "a defect, ZeroDivisionError"
        watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: watched.owner.ends)


async def test_overload_and_refusals_say_nothing_about_its_health() -> None:
    async with Watched() as watched:
        for kind in ("overloaded", "refused"):
            watched.backend.answer = failing(BackendError("x", kind))  # type: ignore[arg-type]
            for _ in range(5):
                watched.controller.forward(NAME, ATTEMPT)
                await until(lambda: not watched.controller.num_attempts)
        assert watched.controller.is_up


async def test_its_circuit_opens_after_failures_in_a_row_and_closes_with_a_probe() -> None:
    async with Watched() as watched:
        watched.backend.answers = [failing(BackendError("x", "server"))] * 2
        watched.backend.error = BackendError("away", "connect")
        for _ in range(2):
            watched.controller.forward(NAME, ATTEMPT)
        await until(lambda: not watched.controller.is_up)
        down = watched.owner.facts[-1]
        assert isinstance(down, BackendDown)
        assert down.epoch == 1
        watched.backend.error = None
        await until(lambda: watched.controller.is_up)
        up = watched.owner.facts[-1]
        assert isinstance(up, BackendUp)
        assert up.epoch == 2


async def test_probes_that_fail_in_a_row_open_it_too() -> None:
    async with Watched() as watched:
        watched.backend.error = BackendError("away", "timeout")
        await until(lambda: not watched.controller.is_up)


async def test_its_load_is_a_fact() -> None:
    async with Watched() as watched:
        watched.backend.load = BackendLoad(running=2, waiting=1)
        await until(lambda: len(watched.owner.facts) > 1)
        assert watched.owner.facts[1] == BackendState(replica=4, epoch=1, running=2, waiting=1)


async def test_it_waits_until_all_is_answered() -> None:
    async with Watched() as watched:
        watched.backend.answer = silent_after(1)
        watched.controller.forward(NAME, ATTEMPT)
        waiting = asyncio.ensure_future(watched.controller.answered())
        await until(lambda: watched.owner.deltas)
        assert not waiting.done()
        watched.controller.end(NAME)
        await waiting
