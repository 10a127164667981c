"""The load against servers that a test scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from eventlm.bench.load import Load
from eventlm.bench.records import LoadRequest, LoadResult, RequestRecord
from eventlm.bench.retries import Retries
from eventlm.client.openai_client import OpenAIClient
from tests.client.scripted import Handler, replying, scripted_server, streaming

MS = 1_000_000


def chunk(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = (chunk("a"), chunk(""), chunk("b"), chunk("", "length"), USAGE, DONE)


def requests(number: int | None = None, *, interval_ms: float | None = None) -> Iterator[LoadRequest]:
    for index in count() if number is None else range(number):
        arrival_ns = None if interval_ms is None else round(index * interval_ms * MS)
        yield LoadRequest(index, {"index": index}, arrival_ns, prompt_tokens=5)


async def run(handler: Handler, load_requests: Iterator[LoadRequest], **settings: Any) -> LoadResult:
    stop = settings.pop("stop", asyncio.Event())
    async with scripted_server(handler) as url, OpenAIClient(url) as client:
        return await Load(client, "completions", load_requests, **settings).run(stop)


class Gate:
    """A server that counts who is inside, and answers nobody before `open` is set."""

    def __init__(self, wanted: int) -> None:
        self.open = asyncio.Event()
        self.full = asyncio.Event()
        self.num_inside = self.peak = 0
        self._wanted = wanted

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.num_inside += 1
        self.peak = max(self.peak, self.num_inside)
        if self.num_inside >= self._wanted:
            self.full.set()
        try:
            await self.open.wait()
            return await streaming(*WHOLE)(request)
        finally:
            self.num_inside -= 1


async def test_what_a_record_holds() -> None:
    ended: list[RequestRecord] = []
    result = await run(streaming(*WHOLE), requests(1), max_concurrency=1, on_end=ended.append)
    [record] = result.records
    assert ended == [record]
    assert record.is_success
    assert len(record.token_times_ns) == 2
    assert (record.prompt_tokens, record.output_tokens, record.counted_by_server) == (3, 7, True)
    assert record.finish_reason == "length"
    assert 0 <= record.intended_ns == record.sent_ns <= record.token_times_ns[0]
    assert record.token_times_ns[0] <= record.token_times_ns[1] <= record.end_ns == result.duration_ns
    assert not result.interrupted


async def test_without_usage_the_events_with_text_are_counted() -> None:
    result = await run(streaming(chunk("a"), chunk("b"), chunk("", "stop"), DONE), requests(1), max_concurrency=1)
    [record] = result.records
    assert (record.prompt_tokens, record.output_tokens, record.counted_by_server) == (5, 2, False)


async def test_a_closed_loop_keeps_its_number() -> None:
    gate = Gate(3)
    task = asyncio.create_task(run(gate.handle, requests(10), max_concurrency=3))
    await asyncio.wait_for(gate.full.wait(), 30)
    assert gate.num_inside == 3
    gate.open.set()
    result = await task
    assert gate.peak == 3
    assert sorted(record.index for record in result.records) == list(range(10))
    assert all(record.is_success for record in result.records)


async def test_an_open_loop_does_not_wait_for_the_server() -> None:
    gate = Gate(20)
    task = asyncio.create_task(run(gate.handle, requests(20, interval_ms=1)))
    await asyncio.wait_for(gate.full.wait(), 30)
    gate.open.set()
    result = await task
    assert [record.intended_ns for record in result.records] == [index * MS for index in range(20)]
    assert all(record.sent_ns >= record.intended_ns for record in result.records)


async def test_waiting_for_a_place_counts() -> None:
    """Two that arrive at once and may not run at once: the second has waited for the first."""
    result = await run(streaming(*WHOLE), requests(2, interval_ms=0), max_concurrency=1)
    first, second = result.records
    assert second.intended_ns == 0
    assert second.sent_ns >= first.end_ns > 0
    assert second.ttft_ns == second.token_times_ns[0] > first.end_ns


async def test_duration_ends_a_closed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes by from one request to the next, and at no other moment."""
    now_ns = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal now_ns
        now_ns += 10 * MS
        return await streaming(*WHOLE)(request)

    monkeypatch.setattr(Load, "_now_ns", lambda self: now_ns)
    result = await run(handle, requests(), max_concurrency=1, duration_ns=45 * MS)
    assert [record.sent_ns for record in result.records] == [0, 10 * MS, 20 * MS, 30 * MS, 40 * MS]
    assert all(record.is_success for record in result.records)


async def test_duration_ends_an_open_loop() -> None:
    result = await run(streaming(*WHOLE), requests(interval_ms=10), duration_ns=45 * MS)
    assert [record.index for record in result.records] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (replying(429, '{"error":{"message":"full"}}'), "http 429"),
        (streaming(chunk("a"), b'data: {"error":{"message":"oops"}}\n\n', DONE), "server"),
        (streaming(chunk("a")), "broken"),
        (replying(200, "<html>", "text/html"), "protocol"),
    ],
)
async def test_failures_by_kind(handler: Handler, kind: str) -> None:
    result = await run(handler, requests(3), max_concurrency=1)
    assert [record.error for record in result.records] == [kind] * 3
    assert all(record.message and record.end_ns for record in result.records)
    assert not result.server_gone


async def test_a_server_that_goes_away_ends_the_load() -> None:
    """It answers five and then drops every connection; an endless load must end, and keep the five."""
    served = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal served
        served += 1
        if served > 5:
            assert request.transport is not None
            request.transport.abort()
        return await streaming(*WHOLE)(request)

    result = await run(handler, requests(), max_concurrency=2)
    assert sum(record.is_success for record in result.records) == 5
    assert result.server_gone
    assert not result.interrupted


async def test_stop_keeps_what_there_is() -> None:
    """Three have ended, two are under way when the signal comes."""
    inside, stop = 0, asyncio.Event()
    hanging = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal inside
        inside += 1
        if inside > 3:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk("x"))
            if inside == 5:
                hanging.set()
            await asyncio.Event().wait()
        return await streaming(*WHOLE)(request)

    async def stop_when_hanging() -> None:
        await asyncio.wait_for(hanging.wait(), 30)
        stop.set()

    stopper = asyncio.create_task(stop_when_hanging())
    result = await run(handler, requests(), max_concurrency=2, stop=stop)
    await stopper
    assert result.interrupted
    assert [record.error for record in result.records] == ["", "", "", "interrupted", "interrupted"]
    assert result.duration_ns == max(record.end_ns for record in result.records)


async def test_a_cancelled_load_sends_nothing_more() -> None:
    """As Ctrl-C does while the client's ceiling is measured: what is cancelled frees places, which nobody may take."""
    gate = Gate(2)
    async with scripted_server(gate.handle) as url:
        async with OpenAIClient(url) as client:
            load = asyncio.create_task(Load(client, "completions", requests(), max_concurrency=2).run(asyncio.Event()))
            await asyncio.wait_for(gate.full.wait(), 30)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert not [task for task in asyncio.all_tasks() if "Load." in repr(task)]
        gate.open.set()
    assert gate.peak == 2


async def test_an_error_of_ours_is_not_swallowed() -> None:
    def broken() -> Iterator[LoadRequest]:
        yield from requests(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run(streaming(*WHOLE), broken(), max_concurrency=2)


class Flaky:
    """A server that fails the attempts whose numbers are in `failures`, and answers all others."""

    def __init__(self, failures: dict[int, Handler]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._failures = failures

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        handler = self._failures.get(len(self.bodies) - 1, streaming(*WHOLE))
        return await handler(request)


AGAIN = Retries(number=2, backoff_s=0.001, max_wait_s=1.0)


async def test_what_fails_before_its_answer_is_tried_again() -> None:
    """Latency counts from the first attempt, and the others are counted by what went before them."""
    server = Flaky({0: replying(429, "{}"), 1: streaming(abort=True), 4: replying(503, "{}")})
    result = await run(server.handle, requests(3), max_concurrency=1, retries=AGAIN)
    assert [body["index"] for body in server.bodies] == [0, 0, 0, 1, 2, 2]
    assert [record.retried for record in result.records] == [["http 429", "broken"], [], ["http 503"]]
    assert all(record.is_success for record in result.records)
    first = result.records[0]
    assert first.ttft_ns == first.token_times_ns[0] - first.sent_ns
    # Two waits, each at least half of its backoff.
    assert first.ttft_ns >= (1 + 2) * MS / 2


async def test_the_last_failure_is_what_counts() -> None:
    server = Flaky({0: replying(500, "{}"), 1: replying(500, "{}"), 2: replying(429, "{}")})
    result = await run(server.handle, requests(1), max_concurrency=1, retries=AGAIN)
    [record] = result.records
    assert (record.error, record.retried) == ("http 429", ["http 500", "http 500"])


@pytest.mark.parametrize("failure", [streaming(chunk("a"), abort=True), replying(400, "{}")])
async def test_an_answer_that_has_begun_or_will_not_come_is_not_asked_for_again(failure: Handler) -> None:
    server = Flaky({0: failure})
    result = await run(server.handle, requests(1), max_concurrency=1, retries=AGAIN)
    [record] = result.records
    assert record.error
    assert (record.retried, len(server.bodies)) == ([], 1)


async def test_a_request_keeps_its_place_while_it_waits_for_another_attempt() -> None:
    server = Flaky({0: replying(429, "{}"), 1: replying(429, "{}")})
    result = await run(server.handle, requests(2), max_concurrency=1, retries=AGAIN)
    first, second = result.records
    assert second.sent_ns >= first.end_ns


async def test_only_the_numbers_that_are_given_are_sent() -> None:
    """And it says how many places are free."""
    numbers, free = iter([1, 2, 5, 8]), []

    async def next_number(num_free: int | None) -> int | None:
        free.append(num_free)
        return next(numbers, None)

    result = await run(streaming(*WHOLE), requests(), max_concurrency=2, rank=3, next_number=next_number)
    assert sorted(record.index for record in result.records) == [1, 2, 5, 8]
    assert {record.rank for record in result.records} == {3}
    assert free[:2] == [2, 1]
    assert set(free) <= {1, 2}


async def test_a_kernel_runs_behind_each_answer_and_holds_no_place() -> None:
    """The first one runs until all requests have ended, which had one place; the others are dropped then."""
    server = Flaky({1: replying(400, "{}")})

    class Kernel:
        def __init__(self) -> None:
            self.started = 0
            self._ended = asyncio.Event()

        async def __call__(self) -> int | None:
            self.started += 1
            is_first = self.started == 1
            await asyncio.wait_for(self._ended.wait(), 30)
            return 7 if is_first else None

        def drop_waiting(self) -> None:
            assert len(server.bodies) == 4
            self._ended.set()

    kernel = Kernel()
    result = await run(server.handle, requests(4), max_concurrency=1, post_kernel=kernel)
    assert [record.post_kernel_ns for record in result.records] == [7, None, None, None]
    assert kernel.started == 3
