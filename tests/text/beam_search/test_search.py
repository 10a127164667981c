"""Searches over an engine with fake workers: what they cost, what they leave, and every way to end them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.engine.admin import Drain
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.rate_limits import RateLimitError, RateLimits, RateLimitState
from eventlm.engine.request import (
    AT_SHUTDOWN,
    BeamSettings,
    EngineUnavailableError,
    GroupSizeError,
    QueueFullError,
    Request,
    Submission,
)
from eventlm.events import Arrived, Cancelled
from eventlm.sampling_params import SamplingParams
from eventlm.text.beam_search import search
from eventlm.text.choice_output import ChoiceOutput, GenerationError, join_outputs
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.generation import Generation, submit
from tests.engine.engines import SLOW, recorded, running, verified
from tests.made_requests import make_request
from tests.processes import PATIENCE_SECONDS

LIMITS = RateLimits(requests_per_minute=10, tokens_per_minute=1000, concurrent_requests=1)
SUBMISSION = Submission(reply_id="cmpl-1", owner="someone", limits=LIMITS)
UNLIMITED = Submission(reply_id="cmpl-1")
PROMPT = list(b"Once upon a time")


def search_request(*, width: int = 4, n: int = 2, max_tokens: int = 20, **more: Any) -> Request:
    sampling = SamplingParams(n=n, temperature=0, max_tokens=max_tokens, seed=3, logprobs=more.pop("logprobs", None))
    return make_request(PROMPT, sampling, beams=BeamSettings(width), **more)


async def begin(engine: InferenceEngine, *group: Request, submission: Submission | None = None) -> Generation:
    return await submit(engine, FakeTokenizer(), group, submission)


async def whole(generation: Generation) -> list[ChoiceOutput]:
    """Each choice; raises what ended one early."""
    pieces: list[list[ChoiceOutput]] = [[] for _ in range(generation.num_choices)]
    async for output in generation.outputs():
        if output.error is not None:
            raise output.error
        pieces[output.choice].append(output)
    return [join_outputs(outputs) for outputs in pieces]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_running(engine: InferenceEngine, num_requests: int) -> None:
    """Until so many requests run or wait."""
    await until(
        lambda: sum(each.num_running + each.num_waiting for each in engine.metrics().log.replicas) >= num_requests
    )


async def until_idle(engine: InferenceEngine) -> None:
    """Until nothing of any search is left."""

    def is_idle() -> bool:
        replicas = engine.metrics().log.replicas
        return not search._running and not any(each.num_running or each.num_waiting for each in replicas)

    await until(is_idle)


async def left_of_limits(engine: InferenceEngine) -> RateLimitState:
    """What is left for the owner before one more request, which must be admitted."""
    request = make_request([1], SamplingParams(max_tokens=1))
    submission = Submission(reply_id="after", owner=SUBMISSION.owner, limits=LIMITS)
    generation = await begin(engine, request, submission=submission)
    await whole(generation)
    state = generation.handles[0].rate_limits
    assert state is not None
    return state


async def test_a_search_is_one_request_with_the_best_beams_as_its_choices(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake={"end_ppm": 0}) as engine:
        generation = await begin(engine, search_request(logprobs=3), submission=SUBMISSION)
        choices = await whole(generation)
        counts = generation.token_counts()
        assert [len(choice.token_ids) for choice in choices] == [20, 20]
        assert (counts.prompt, counts.completion) == (len(PROMPT), 40)
        assert [choice.finished.reason for choice in choices if choice.finished] == ["length", "length"]
        # Better beams first, and no two alike.
        totals = []
        for choice in choices:
            assert choice.logprobs is not None
            assert [len(top) for top in choice.logprobs.top_ids] == [3] * 20
            totals.append(sum(choice.logprobs.logprobs))
        assert totals[0] >= totals[1]
        assert choices[0].token_ids != choices[1].token_ids
        # The times of a choice are those of the whole search.
        row = generation.rows[1]
        assert (row.index, row.output_tokens, row.reason) == (1, 20, "length")
        assert row.finished_ns > row.arrived_ns + 20 * 2_000_000
        await until_idle(engine)
        # In what counts requests, its first one stands for all.
        log = engine.metrics().log
        [replica] = log.replicas
        assert (log.num_requests, replica.finish_reasons, replica.prompt_tokens) == (1, {"length": 1}, len(PROMPT))
        assert {sum(replica.histograms[name].counts) for name in ("prefill_e2e_time", "request_e2e_time")} == {1}
    assert verified(engine).clean_end
    events = recorded(engine)
    [first, *others] = [event for event in events if isinstance(event, Arrived)]
    assert len(others) < 4 * 19
    assert {event.scheduling.parent for event in others} == {first.s}
    assert {event.reason for event in events if isinstance(event, Cancelled)} <= {"pruned"}


async def test_the_same_search_finds_the_same() -> None:
    async with running() as engine:
        first, second = [
            [choice.token_ids for choice in await whole(await begin(engine, search_request()))] for _ in range(2)
        ]
    assert first == second


async def test_priority_class_and_objectives_are_those_of_the_request(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        request = search_request(
            priority=-5, service_class="gold", slo_ttft_ns=10**9, slo_tpot_ns=10**8, deadline_ns=10**10, received_ns=1
        )
        await whole(await begin(engine, request))
    first, *others = [event.scheduling for event in recorded(engine) if isinstance(event, Arrived)]
    assert (first.deadline_ns, first.slo_ttft_ns, first.offline) == (10**10, 10**9, False)
    # Their first token is one between two tokens of the search.
    assert {(each.deadline_ns, each.slo_ttft_ns, each.slo_tpot_ns) for each in others} == {(0, 10**8, 10**8)}
    assert {(each.priority, each.service_class) for each in [first, *others]} == {(-5, "gold")}


async def test_a_search_counts_as_one_request_and_with_the_tokens_it_used() -> None:
    async with running() as engine:
        generation = await begin(engine, search_request(max_tokens=200), submission=SUBMISSION)
        state = generation.handles[0].rate_limits
        assert state is not None
        assert state.requests is not None
        assert state.tokens is not None
        assert (state.requests.remaining, state.tokens.remaining) == (9, 1000 - len(PROMPT) - 4 * 200)
        await until(lambda: engine.metrics().log.replicas[0].generation_tokens >= 60)
        with pytest.raises(RateLimitError, match="1 request at once is reached"):
            await left_of_limits(engine)
        generation.cancel()
        await until_idle(engine)
        state = await left_of_limits(engine)
        assert state.requests is not None
        assert state.tokens is not None
        assert state.requests.remaining == 8
        # Less than was reserved, and not nothing. A few have come back since.
        assert 1000 - len(PROMPT) - 4 * 200 < state.tokens.remaining < 1000 - len(PROMPT) - 20


async def test_a_client_that_leaves_ends_all_beams(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake=SLOW) as engine:
        generation = await begin(engine, search_request(max_tokens=200), search_request(max_tokens=200))
        await until_running(engine, 8)
        generation.cancel()
        await until_idle(engine)
        with pytest.raises(GenerationError) as caught:
            await whole(generation)
        assert (caught.value.reason, caught.value.detail) == ("cancelled", "client")
    assert verified(engine).clean_end


async def test_its_owner_can_end_it() -> None:
    async with running(fake=SLOW) as engine:
        generation = await begin(engine, search_request(max_tokens=200), submission=SUBMISSION)
        await until_running(engine, 4)
        status = await engine.status("cmpl-1", "someone")
        assert [(each.index, each.state) for each in status.samples] == [(0, "running"), (1, "running")]
        assert status.num_branches >= 3
        assert await engine.cancel_reply("cmpl-1", "someone")
        with pytest.raises(GenerationError) as caught:
            await whole(generation)
        assert (caught.value.reason, caught.value.detail) == ("cancelled", "owner")
        await until_idle(engine)
        await left_of_limits(engine)


async def test_between_two_groups_its_owner_can_end_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        submit_group = engine.submit

        async def cancelled_before(group: Any, *, submission: Any = None, on_output: Any = None) -> Any:
            if submission.goes_on:
                engine.registry.find("cmpl-1", "someone").close()
            return await submit_group(group, submission=submission, on_output=on_output)

        monkeypatch.setattr(engine, "submit", cancelled_before)
        with pytest.raises(GenerationError, match="cancelled by its owner"):
            await whole(await begin(engine, search_request(), submission=SUBMISSION))
        await until_idle(engine)


async def test_a_drain_lets_a_search_finish_and_a_stop_ends_it() -> None:
    async with running(fake=SLOW) as engine:
        finishes = await begin(engine, search_request(width=2, max_tokens=8), submission=SUBMISSION)
        await engine.administer(Drain())
        assert [len(choice.token_ids) for choice in await whole(finishes)] == [8, 8]
    async with running(fake=SLOW) as engine:
        ends = await begin(engine, search_request(max_tokens=200), submission=SUBMISSION)
        await until_running(engine, 4)
        await engine.stop()
        with pytest.raises((GenerationError, EngineUnavailableError)) as caught:
            await whole(ends)
        assert getattr(caught.value, "detail", AT_SHUTDOWN) == AT_SHUTDOWN


async def test_a_deadline_that_its_first_token_misses() -> None:
    async with running(fake=SLOW) as engine:
        generation = await begin(engine, search_request(deadline_ns=1_000_000, drop_if_late=True))
        with pytest.raises(GenerationError) as caught:
            await whole(generation)
        assert caught.value.reason == "deadline"


async def test_a_defect_in_a_search_reaches_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(fake=SLOW) as engine:
        generation = await begin(engine, search_request(max_tokens=200), submission=SUBMISSION)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("eventlm.text.beam_search.beams.Beams.advance", fail)
        with pytest.raises(EngineUnavailableError, match="the search failed"):
            await whole(generation)
        await until_idle(engine)
        await left_of_limits(engine)


async def test_a_search_takes_room_for_all_its_beams() -> None:
    async with running(fake=SLOW, max_queue_len=6, max_num_seqs=2) as engine:
        with pytest.raises(GroupSizeError, match="asks for 10 sequences at once, and this server takes 8"):
            await begin(engine, search_request(width=5), search_request(width=5), submission=UNLIMITED)
        # Both arrive in one tick, before either has any beam beside its root.
        first, second = await asyncio.gather(
            begin(engine, search_request(width=5, max_tokens=200), submission=UNLIMITED),
            begin(engine, search_request(width=5), submission=Submission(reply_id="cmpl-2")),
            return_exceptions=True,
        )
        assert isinstance(first, Generation)
        assert isinstance(second, QueueFullError)
        await until_running(engine, 5)
        assert sum(each.num_waiting for each in engine.metrics().log.replicas) > 0
        first.cancel()
        await until_idle(engine)
        last = await begin(engine, search_request(width=8, max_tokens=2), submission=UNLIMITED)
        assert len(await whole(last)) == 2
        await until_idle(engine)
        assert engine.registry.num_searched == 0
