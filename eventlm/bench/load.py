"""The load itself: send requests at their times or as slots come free, and record what comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

from eventlm.bench.ranks import NextNumber
from eventlm.bench.records import INTERRUPTED, LoadRequest, LoadResult, RequestRecord
from eventlm.bench.retries import NO_RETRIES, Retries, error_kind
from eventlm.client.errors import ClientError
from eventlm.client.openai_client import OpenAIClient
from eventlm.tasks import completed

if TYPE_CHECKING:
    from eventlm.bench.post_kernel import PostKernel

Endpoint = Literal["completions", "chat"]

#: After so many unanswered requests in a row the server counts as gone.
MAX_UNANSWERED = 16


class Load:
    """One load on one server. `run` returns its result, however it ends.

    `requests` come in the order of their arrivals; with `next_number` only those whose index it gives are sent.
    `max_concurrency` 0 sets no limit; a request that waits for a slot is late, not excused, and one that is tried again
    keeps its slot. After `duration_ns` (0: no end) no more arrive, and those that have may end. After
    `max_unanswered` requests in a row without an answer the server is gone, which ends the load. `post_kernel` runs
    behind each answer, when its slot is free again; those that wait when all requests have ended are dropped.
    """

    def __init__(
        self,
        client: OpenAIClient,
        endpoint: Endpoint,
        requests: Iterator[LoadRequest],
        *,
        max_concurrency: int = 0,
        duration_ns: int = 0,
        max_unanswered: int = MAX_UNANSWERED,
        retries: Retries = NO_RETRIES,
        rank: int = 0,
        next_number: NextNumber | None = None,
        post_kernel: PostKernel | None = None,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._stream = client.stream_chat if endpoint == "chat" else client.stream_completion
        self._requests = requests
        self._max_concurrency = max_concurrency
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._num_under_way = 0
        self._duration_ns = duration_ns
        self._max_unanswered = max_unanswered
        self._retries = retries
        self._rank = rank
        self._next_number = next_number
        self._post_kernel = post_kernel
        self._on_end = on_end
        self._records: list[RequestRecord] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._kernels: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._server_gone = ""
        self._start_ns = self._start_cpu_ns = self._end_cpu_ns = 0

    async def run(self, stop: asyncio.Event) -> LoadResult:
        """Send everything and wait for its end; `stop` or a cancellation ends what is under way."""
        self._start_ns = time.monotonic_ns()
        self._start_cpu_ns = self._end_cpu_ns = time.process_time_ns()
        try:
            interrupted = await completed(self._send_all(), stop) is None
        finally:
            # The caller closes the client next: nothing may be sent after that.
            left = self._tasks | self._kernels
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return LoadResult(
            self._records,
            duration_ns=max((record.end_ns for record in self._records), default=0),
            cpu_ns=self._end_cpu_ns - self._start_cpu_ns,
            interrupted=interrupted,
            server_gone=self._server_gone,
        )

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    async def _send_all(self) -> None:
        while (request := await self._next_request()) is not None:
            if request.arrival_ns is not None:
                await self._sleep_until(request.arrival_ns)
            if self._server_gone or self._is_over(request):
                break
            self._num_under_way += 1
            task = asyncio.create_task(self._send(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            # A task's error is raised here.
            await asyncio.gather(*self._tasks)
        if self._server_gone and self._next_number is not None:
            await self._next_number(None)
        if self._post_kernel is not None:
            self._post_kernel.drop_waiting()
            await asyncio.gather(*self._kernels)

    async def _next_request(self) -> LoadRequest | None:
        """The next request to send, with a place; None at the end."""
        if self._next_number is None:
            # It is made while others are under way.
            request = next(self._requests, None)
            if request is not None:
                await self._take_place()
            return request
        await self._take_place()
        number = await self._next_number(self._max_concurrency - self._num_under_way)
        if number is None:
            return None
        return next((request for request in self._requests if request.index == number), None)

    async def _take_place(self) -> None:
        if self._places is not None:
            await self._places.acquire()

    def _is_over(self, request: LoadRequest) -> bool:
        due_ns = self._now_ns() if request.arrival_ns is None else request.arrival_ns
        return bool(self._duration_ns) and due_ns > self._duration_ns

    async def _sleep_until(self, due_ns: int) -> None:
        if self._duration_ns:
            due_ns = min(due_ns, self._duration_ns)
        # The event loop's timer may fire a little early.
        while (left_ns := due_ns - self._now_ns()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_ns / 1e9)

    async def _send(self, request: LoadRequest) -> None:
        now_ns = self._now_ns()
        record = RequestRecord(
            index=request.index,
            intended_ns=now_ns if request.arrival_ns is None else request.arrival_ns,
            sent_ns=now_ns,
            prompt_tokens=request.prompt_tokens,
            token_times_ns=[],
            rank=self._rank,
        )
        self._records.append(record)
        try:
            await self._attempt(record, request.body)
            self._unanswered = 0
        except ClientError as error:
            self._fail(record, error)
        except asyncio.CancelledError:
            record.error, record.end_ns = INTERRUPTED, self._now_ns()
            raise
        finally:
            record.token_times_ns = [token_ns - self._start_ns for token_ns in record.token_times_ns]
            # Kernels behind the answers may run on.
            self._end_cpu_ns = time.process_time_ns()
            self._num_under_way -= 1
            if self._places is not None:
                self._places.release()
            if self._on_end is not None:
                self._on_end(record)
        if self._post_kernel is not None and record.is_success:
            kernel = asyncio.create_task(self._run_kernel(self._post_kernel, record))
            self._kernels.add(kernel)
            kernel.add_done_callback(self._kernels.discard)

    @staticmethod
    async def _run_kernel(kernel: PostKernel, record: RequestRecord) -> None:
        record.post_kernel_ns = await kernel()

    async def _attempt(self, record: RequestRecord, body: dict[str, Any]) -> None:
        """Consume the answer; what fails before an answer has begun is tried again, as often as is allowed."""
        while True:
            try:
                return await self._consume(record, body)
            except ClientError as error:
                wait_s = self._retries.wait_s(error, index=record.index, num_failed=len(record.retried) + 1)
                if wait_s is None or record.token_times_ns:
                    raise
                record.retried.append(error_kind(error))
            await asyncio.sleep(wait_s)

    async def _consume(self, record: RequestRecord, body: dict[str, Any]) -> None:
        token_times_ns = record.token_times_ns
        received_ns, usage = 0, None
        async with aclosing(self._stream(body)) as deltas:
            async for delta in deltas:
                if delta.text or delta.reasoning:
                    token_times_ns.append(delta.received_ns)
                    received_ns = delta.received_ns
                if delta.finish_reason is not None:
                    record.finish_reason = delta.finish_reason
                    received_ns = delta.received_ns
                if delta.usage is not None:
                    usage = delta.usage
        record.end_ns = (received_ns or time.monotonic_ns()) - self._start_ns
        record.output_tokens = len(token_times_ns)
        if usage is not None and usage.completion_tokens is not None:
            record.output_tokens, record.counted_by_server = usage.completion_tokens, True
        if usage is not None and usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens

    def _fail(self, record: RequestRecord, error: ClientError) -> None:
        record.end_ns = self._now_ns()
        record.error = error_kind(error)
        record.message = str(error)
        record.output_tokens = len(record.token_times_ns)
        is_unanswered = error.kind in ("connection", "broken") and not record.token_times_ns
        self._unanswered = self._unanswered + 1 if is_unanswered else 0
        if self._unanswered >= self._max_unanswered:
            self._server_gone = str(error)
