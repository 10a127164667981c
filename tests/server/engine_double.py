"""An engine in memory that speaks scripted tokens, with the two-phase finish of the real one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from eventlm.control.metrics import MetricsStore
from eventlm.control.metrics_aggregates import Histogram
from eventlm.control.metrics_components import SCHEDULING_BUCKETS_NS, EngineMetrics
from eventlm.control.request import (
    ClosingOutput,
    EngineRequest,
    FinishedOutput,
    PromptLogprobsOutput,
    RequestHandle,
    TokensOutput,
)
from eventlm.errors import EventLMError
from eventlm.sampler_params import TokenLogprobs
from eventlm.types import FinishReason

#: Steps of one sequence, each the tokens of a step.
Script = Callable[[EngineRequest, int], list[list[int]]]


def spell(text: str, *, width: int = 1) -> Script:
    """Every sequence says `text`, as byte tokens of the fake tokenizer, `width` of them a step."""
    data = list(text.encode())
    steps = [data[place : place + width] for place in range(0, len(data), width)]
    return lambda request, index: steps


def spell_logprobs(token_ids: Sequence[int], num_top: int | None) -> TokenLogprobs | None:
    """Made-up log-probabilities: of a token minus its id by 100, the most likely one being 32 and then upwards."""
    if num_top is None:
        return None
    return TokenLogprobs(
        logprobs=[-token_id / 100 if token_id != 0 else -math.inf for token_id in token_ids],
        ranks=[token_id + 1 for token_id in token_ids],
        top_ids=[list(range(32, 32 + num_top)) for _ in token_ids],
        top_logprobs=[[-(32 + place) / 100 for place in range(num_top)] for _ in token_ids],
    )


class EngineDouble:
    """See `eventlm.server.engine_protocol.Engine`. Script and pace can be changed between requests."""

    def __init__(self, script: Script) -> None:
        self.state: Literal["loading", "ready", "draining", "dead"] = "ready"
        self.max_model_len = 256
        self.model_names = ["test", "org/test"]
        self.script = script
        self.step_seconds = 0.0
        #: How the script's end is told; None goes on for ever with the last step.
        self.script_end: FinishReason | None = "eos"
        self.submit_error: EventLMError | None = None
        self.submit_seconds = 0.0
        self.submitted = asyncio.Event()
        self.requests: list[EngineRequest] = []
        self.cancelled: list[tuple[int, str]] = []
        self.text_ends: list[tuple[int, int, int, str]] = []
        self.handles: list[RequestHandle] = []
        self.store = MetricsStore()
        self._ends: dict[tuple[int, int], asyncio.Future[tuple[FinishReason, int | None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            log=self.store.snapshot(), state=self.state, scheduling_time=Histogram.over(SCHEDULING_BUCKETS_NS)
        )

    async def submit(self, group: Sequence[EngineRequest]) -> list[RequestHandle]:
        await asyncio.sleep(self.submit_seconds)
        if self.submit_error is not None:
            raise self.submit_error
        handles = [self._start(request) for request in group]
        self.submitted.set()
        return handles

    def fail(self, error: EventLMError) -> None:
        """The engine dies under all that runs."""
        for task in self._tasks:
            task.cancel()
        for handle in self.handles:
            handle.put(error)

    def _start(self, request: EngineRequest) -> RequestHandle:
        number = len(self.requests)
        self.requests.append(request)
        handle = RequestHandle(number, request.n, self._text_ended, self._cancel)
        self.handles.append(handle)
        for index in range(request.n):
            self._ends[number, index] = asyncio.get_running_loop().create_future()
            self._tasks.append(asyncio.create_task(self._run(request, handle, index)))
        return handle

    async def _run(self, request: EngineRequest, handle: RequestHandle, index: int) -> None:
        end = self._ends[handle.request, index]
        reason: FinishReason = self.script_end or "length"
        num_tokens = 0
        self._put_prompt_logprobs(request, handle, index)
        for step in self._steps(request, index):
            await asyncio.sleep(self.step_seconds)
            if end.done():
                break
            token_ids = step[: request.params.max_tokens - num_tokens]
            logprobs = spell_logprobs(token_ids, request.params.logprobs)
            handle.put(TokensOutput(index, num_tokens, token_ids, logprobs))
            num_tokens += len(token_ids)
            if num_tokens == request.params.max_tokens:
                reason = "length"
                break
        if not end.done():
            if not request.has_text_ends:
                end.set_result((reason, num_tokens))
            else:
                handle.put(ClosingOutput(index, reason, num_tokens))
        told, position = await end
        finish = told or reason
        handle.put(FinishedOutput(index, finish, num_tokens if position is None else position, cached_tokens=4))

    def _put_prompt_logprobs(self, request: EngineRequest, handle: RequestHandle, index: int) -> None:
        """In two chunks, the first of which comes again, as behind a preemption."""
        num_top = request.params.prompt_logprobs
        chunks = [request.prompt_token_ids[1:5], request.prompt_token_ids[5:]]
        starts = [1, 5]
        for which in (0, 0, 1):
            logprobs = spell_logprobs(chunks[which], num_top)
            if logprobs is not None and chunks[which]:
                handle.put(PromptLogprobsOutput(index, starts[which], logprobs))

    def _steps(self, request: EngineRequest, index: int):
        steps = self.script(request, index)
        yield from steps
        while self.script_end is None:
            yield steps[-1]

    def _text_ended(self, request: int, index: int, position: int, reason: str) -> None:
        self.text_ends.append((request, index, position, reason))
        end = self._ends[request, index]
        if not end.done():
            end.set_result((reason, position))

    def _cancel(self, request: int, reason: str) -> None:
        self.cancelled.append((request, reason))
        for (number, _), end in self._ends.items():
            if number == request and not end.done():
                end.set_result(("cancelled", None))
