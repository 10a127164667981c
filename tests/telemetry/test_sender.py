"""The queue of spans against a real receiver: batches, retries, refusals, and drops that are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from eventlm.telemetry import sender as module
from eventlm.telemetry.sender import BATCH_SPANS, SpanSender
from eventlm.telemetry.spans import Span
from tests.processes import until
from tests.telemetry.receiver import Receiver, receiving


def span(number: int) -> Span:
    return Span(name="decode", trace_id=f"{number + 1:032x}", span_id=f"{number + 1:016x}", start_ns=1, end_ns=2)


@pytest.fixture(scope="module")
def one_receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def receiver(one_receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    monkeypatch.setattr(module, "BATCH_SECONDS", 0.01)
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.01)
    one_receiver.requests.clear()
    one_receiver.num_rejected = 0
    return one_receiver


@contextlib.asynccontextmanager
async def sending(url: str, *, max_waiting: int = 10_000) -> AsyncIterator[SpanSender]:
    async with aiohttp.ClientSession() as session:
        yield SpanSender(session, f"{url}/v1/traces", {"service.name": "eventlm"}, max_waiting=max_waiting)


async def run_until_empty(sender: SpanSender) -> None:
    task = asyncio.create_task(sender.run())
    await until(lambda: not sender.num_waiting)
    task.cancel()
    await asyncio.wait({task})


async def test_spans_arrive_in_batches(receiver: Receiver) -> None:
    async with sending(receiver.url) as sender:
        for number in range(2 * BATCH_SPANS + 3):
            sender.put(span(number))
        await run_until_empty(sender)
    assert [len(request.resource_spans[0].scope_spans[0].spans) for request in receiver.requests] == [512, 512, 3]
    assert [each.span_id for each in receiver.spans] == [
        bytes.fromhex(span(number).span_id) for number in range(2 * BATCH_SPANS + 3)
    ]
    assert (sender.num_sent, sender.num_dropped, sender.num_failures) == (2 * BATCH_SPANS + 3, {}, 0)


async def test_what_may_succeed_later_is_sent_again(receiver: Receiver) -> None:
    receiver.statuses = [503, 429]
    async with sending(receiver.url) as sender:
        sender.put(span(0))
        await run_until_empty(sender)
    assert (sender.num_sent, sender.num_failures, sender.problem) == (1, 2, "")
    assert len(receiver.spans) == 1


async def test_what_is_refused_is_dropped_and_counted(receiver: Receiver) -> None:
    receiver.statuses = [400]
    async with sending(receiver.url) as sender:
        sender.put(span(0))
        await run_until_empty(sender)
        assert sender.problem.startswith("HTTP 400")
        receiver.num_rejected = 1
        sender.put(span(1))
        sender.put(span(2))
        await run_until_empty(sender)
    assert (sender.num_sent, sender.num_dropped, sender.num_failures) == (1, {"refused": 2}, 1)


async def test_a_full_queue_drops_what_comes(receiver: Receiver) -> None:
    async with sending(receiver.url, max_waiting=5) as sender:
        for number in range(8):
            sender.put(span(number))
        assert (sender.num_waiting, sender.num_dropped) == (5, {"queue_full": 3})
        await sender.flush()
    assert (sender.num_sent, sender.num_waiting) == (5, 0)


async def test_a_dead_endpoint_is_tried_again_and_keeps_no_flush(unused_tcp_port: int, receiver: Receiver) -> None:
    async with sending(f"http://127.0.0.1:{unused_tcp_port}") as sender:
        sender.put(span(0))
        task = asyncio.create_task(sender.run())
        await until(lambda: sender.num_failures >= 3)
        task.cancel()
        await asyncio.wait({task})
        assert sender.problem
        assert sender.num_waiting == 1
        await sender.flush()
    assert (sender.num_sent, sender.num_dropped) == (0, {"not_sent": 1})


async def test_the_log_would_be_read_again_from_the_oldest_span_that_waits(receiver: Receiver) -> None:
    receiver.statuses = [503]
    async with sending(receiver.url) as sender:
        assert sender.resume_s is None
        for number in range(BATCH_SPANS + 1):
            sender.put(span(number), resume_s=number // 2)
        task = asyncio.create_task(sender.run())
        await until(lambda: sender.num_failures == 1)
        assert sender.resume_s == 0
        # The last span waits for more, or goes alone.
        await until(lambda: sender.resume_s in (BATCH_SPANS // 2, None))
        task.cancel()
        await asyncio.wait({task})
        sender.put(span(0), resume_s=7)
        assert sender.resume_s in (7, BATCH_SPANS // 2)


async def test_what_cannot_be_posted_at_all_is_a_failure_and_no_crash(receiver: Receiver) -> None:
    async with aiohttp.ClientSession(headers={"x": "a\nb"}) as session:
        sender = SpanSender(session, f"{receiver.url}/v1/traces", {})
        sender.put(span(0))
        await sender.flush()
    assert (sender.num_failures, sender.num_dropped) == (1, {"not_sent": 1})
    assert sender.problem
