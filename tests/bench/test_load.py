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
