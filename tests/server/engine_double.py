"""An engine in memory that speaks scripted tokens, with the two-phase finish of the real one."""

from __future__ import annotations

import asyncio
import functools
import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, cast

from msgspec import UNSET, structs

from eventlm.config import ServerConfig
from eventlm.engine.admin import (
    Abort,
    AdminAction,
    AmbiguousRequestError,
    EngineStatus,
    FlushCache,
    FlushedCache,
    ReplicaStatus,
    SwapPolicy,
    UnknownPolicyError,
    UnknownRequestError,
    reply_named,
)
from eventlm.engine.backend import AnswerDelta, AnswerEnd, BackendFailure
from eventlm.engine.backends.actions import AddBackend, BackendAction, RemoveBackend
from eventlm.engine.backends.backend_set import UnknownBackendError
from eventlm.engine.explanations import ExplainResponse, NotExplainedError
from eventlm.engine.group_admission import charge_for, reply_with_sinks
from eventlm.engine.live_requests import Sink
from eventlm.engine.object_store.actions import Objects
from eventlm.engine.object_store.store import ObjectStore
from eventlm.engine.oldest_requests import ListedSequence, OldestRequests
from eventlm.engine.rate_limits import NO_LIMITS, RateLimiter, RateLimits
from eventlm.engine.reports import NoReportError
from eventlm.engine.request import (
    ClosingOutput,
    FinishedOutput,
    IdempotencyKey,
    ModelBusyError,
    OnOutput,
    PooledOutput,
    PromptLogprobsOutput,
    Request,
    RequestHandle,
    ResumedReply,
    Submission,
    TextOutput,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.engine.request_registry import ReplyStatus, RequestRegistry, SampleStatus, reply_status
from eventlm.errors import EventLMError, UsageError
from eventlm.metrics.components import SCHEDULING_BUCKETS_NS, CacheInfo, EngineMetrics
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.sampling_params import TokenLogprobs
from eventlm.system.system import real_system
from eventlm.types import FinishReason

#: Steps of one sequence, each the tokens of a step.
Script = Callable[[Request, int], list[list[int]]]


def spell(text: str, *, width: int = 1) -> Script:
    """Every sequence says `text`, as byte tokens of the fake tokenizer, `width` of them a step."""
    data = list(text.encode())
    steps = [data[position : position + width] for position in range(0, len(data), width)]
    return lambda request, index: steps


def spell_logprobs(
    token_ids: Sequence[int], num_top: int | None, named: list[int] | None = None
) -> TokenLogprobs | None:
    """Made-up log-probabilities: of a token minus its id by 100, the most likely one being 32 and then upwards."""
    if num_top is None:
        return None
    top_ids = list(range(32, 32 + num_top)) if named is None else named
    return TokenLogprobs(
        logprobs=[-token_id / 100 if token_id != 0 else -math.inf for token_id in token_ids],
        ranks=[token_id + 1 for token_id in token_ids],
        top_ids=[top_ids for _ in token_ids],
        top_logprobs=[[-token_id / 100 for token_id in top_ids] for _ in token_ids],
    )


def spell_embedding(token_ids: Sequence[int]) -> bytes:
    """16 numbers: of a prompt its length, the sum of its ids, then zeros."""
    return struct.pack("<16f", len(token_ids), sum(token_ids), *[0.0] * 14)


class EngineDouble:
    """See `eventlm.text.engine.Engine`. Script and pace can be changed between requests.

    answer: what a backend says to each choice of a forwarded request, the last of it being the end.
    """

    def __init__(self, script: Script, config: ServerConfig | None = None) -> None:
        self.state: Literal["loading", "ready", "draining", "dead"] = "ready"
        self.paused = False
        self.has_worker = True
        self.num_waiting_for_room = 0
        #: What the status says.
        self.num_requests_of_others = 0
        self.max_model_len = 256
        self.server_id = "server-test"
        self.model_names = ["test", "org/test"]
        #: Models that give way where they may.
        self.busy: set[str] = set()
        self.script = script
        self.answer: list[AnswerDelta | AnswerEnd | BackendFailure] = [AnswerDelta("Hello", 1), AnswerEnd("stop")]
        self.step_seconds = 0.0
        #: How the script's end is told; None goes on for ever with the last step.
        self.script_end: FinishReason | None = "eos"
        self.submit_error: EventLMError | None = None
        self.submit_seconds = 0.0
        #: Groups that have come, whether they were taken or not.
        self.num_groups = 0
        #: Once all requests together have said so many tokens, they wait until it is more.
        self.most_said = math.inf
        self.limiter = RateLimiter()
        self.actions: list[AdminAction] = []
        self.submitted = asyncio.Event()
        self.explain_error: NotExplainedError | None = None
        self.report_error: NoReportError | None = None
        #: What is told of the oldest requests, and how many were asked for each time.
        self.waiting: list[ListedSequence] = []
        self.running: list[ListedSequence] = []
        self.replicas: list[ReplicaStatus] = []
        self.limits: list[int] = []
        self.rows = EndedRows()
        self.requests: list[Request] = []
        self.cancelled: list[tuple[int, str]] = []
        #: By whom each request was cancelled first.
        self.cancelled_by: dict[int, str] = {}
        self.text_ends: list[tuple[int, int, int, str]] = []
        self.handles: list[RequestHandle] = []
        #: Tokens of all requests so far.
        self.num_said = 0
        self.object_store = ObjectStore(real_system(), config or ServerConfig())
        self.objects = Objects(self.object_store.carry_out)
        self.keep(seconds=0)
        self._sinks: list[Sink] = []
        self.store = MetricsStore()
        self._ends: dict[tuple[int, int], asyncio.Future[tuple[FinishReason | Literal[""], int | None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def read_metrics(self) -> EngineMetrics:
        return EngineMetrics(
            log=self.store.snapshot(),
            state=self.state,
            scheduling_time=Histogram.over(SCHEDULING_BUCKETS_NS),
            now_ns=self.now_ns(),
            cache=CacheInfo(
                block_size=16, num_blocks=64, prefix_cache=True, dtype="auto", gpu_memory_utilization="0.9"
            ),
        )

    async def submit(
        self,
        group: Sequence[Request],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        self.num_groups += 1
        await asyncio.sleep(self.submit_seconds)
        if self.submit_error is not None:
            raise self.submit_error
        if group[0].scheduling.model in self.busy and submission is not None and submission.gives_way_ns >= 0:
            raise ModelBusyError("no replica is up")
        if submission is not None:
            self.registry.check_key(submission)
        charge = charge_for(self.limiter, submission, group, self.now_ns()) if submission is not None else None
        handles = [self._handle(request, index, on_output) for index, request in enumerate(group)]
        sinks = [handle.put for handle in handles]
        if charge is not None:
            handles[0].rate_limits = charge.state
        if submission is not None:
            reply, sinks = reply_with_sinks(self.registry, submission, group, sinks, charge)
            self.registry.add(reply, [handle.request for handle in handles])
        for request, handle, sink in zip(group, handles, sinks, strict=True):
            self._start(request, handle.request, sink)
        self.submitted.set()
        return handles

    def fail(self, error: EventLMError) -> None:
        """The engine dies under all that runs."""
        for task in self._tasks:
            task.cancel()
        for put in self._sinks:
            put(error)

    async def resume(
        self, reply_id: str, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        self.limiter.count(owner, limits, self.now_ns())
        return self.registry.resume(reply_id, owner, on_output)

    async def join(
        self, key: IdempotencyKey, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        reply = self.registry.find_by_key(key, owner)
        self.limiter.count(owner, limits, self.now_ns())
        return self.registry.read_again(reply, on_output)

    async def administer(self, action: AdminAction) -> EngineStatus:
        self.actions.append(action)
        if isinstance(action, SwapPolicy) and action.name != "edf":
            raise UnknownPolicyError(f"unknown policy '{action.name}'; installed at start: fcfs, edf")
        if isinstance(action, AddBackend) and action.name == "taken:1":
            raise UsageError("the backend taken:1 is there already")
        if isinstance(action, RemoveBackend) and action.name == "nowhere:1":
            raise UnknownBackendError("there is no backend 'nowhere:1'")
        if isinstance(action, Abort) and action.request == "job-1":
            raise AmbiguousRequestError("2 replies have the id 'job-1'; give a reply's own id: cmpl-1, cmpl-2")
        if isinstance(action, Abort) and action.request != "cmpl-1":
            raise UnknownRequestError(f"no request '{action.request}' is under way")
        return EngineStatus(
            state=self.state,
            paused=False,
            policy="fcfs",
            policies=["fcfs", "edf"],
            num_requests=self.num_requests_of_others,
            num_at_lowest_priority=0,
            num_waiting=0,
            replicas=[],
            flushed=FlushedCache(num_blocks=7, num_replicas=2) if isinstance(action, FlushCache) else UNSET,
            backends=[] if isinstance(action, BackendAction) else UNSET,
        )

    async def list_oldest(self, limit: int) -> OldestRequests:
        self.limits.append(limit)
        return OldestRequests(
            paused=False,
            policy="fcfs",
            num_requests=len(self.waiting),
            num_waiting=len(self.waiting),
            replicas=self.replicas,
            waiting=self.waiting[:limit],
            running=self.running[:limit],
        )

    async def report(self, seconds: int) -> bytes:
        if self.report_error is not None:
            raise self.report_error
        return b"<p>%d s</p>" % seconds

    def leave(self, reply_id: str, reader: int) -> None:
        self.registry.leave(reply_id, reader)

    async def status(self, reply_id: str, owner: str | None) -> ReplyStatus:
        registry = self.registry
        reply = registry.find(reply_id, owner) if owner is not None else reply_named(reply_id, registry)
        status = reply_status(reply, None, self.rows)
        return structs.replace(status, samples=[self._present(sample) for sample in status.samples])

    def _present(self, sample: SampleStatus) -> SampleStatus:
        end = self._ends.get((sample.request, sample.index))
        if end is None or end.done():
            return sample
        return structs.replace(sample, state="running" if self.num_said else "waiting")

    async def explain(self, reply_id: str, owner: str) -> ExplainResponse:
        reply = self.registry.find(reply_id, owner)
        if self.explain_error is not None:
            raise self.explain_error
        return ExplainResponse(explanations=[f'{{"request":{request}}}' for request in reply.requests], text="a story")

    async def cancel_reply(self, reply_id: str, owner: str) -> bool:
        reply = self.registry.find(reply_id, owner)
        running = {number for (number, _), end in self._ends.items() if not end.done()} & set(reply.requests)
        for request in sorted(running):
            self.cancel(request, "owner")
        if not self.registry.drop(reply) and not running:
            raise UnknownReplyError(f"nothing is kept of '{reply_id}'")
        return bool(running)

    def keep(self, *, seconds: int, max_bytes: int = 1 << 20) -> None:
        """Keep what is said of resumable replies from now on."""

        def wake(delay_ns: int) -> None:
            asyncio.get_running_loop().call_later(delay_ns / 1e9, lambda: self.registry.expire())

        self.registry = RequestRegistry(
            keep_ns=seconds * 1_000_000_000,
            max_bytes=max_bytes,
            now_ns=self.now_ns,
            cancel=lambda request: self.cancel(request, "client"),
            wake=wake,
        )

    def _handle(self, request: Request, index: int, on_output: OnOutput | None) -> RequestHandle:
        number = len(self.requests)
        self.requests.append(request)
        put = on_output and functools.partial(on_output, index)
        self.handles.append(RequestHandle(number, request.n, self.end_text, self.cancel, put))
        return self.handles[-1]

    def _start(self, request: Request, number: int, sink: Sink) -> None:
        self._sinks.append(sink)
        for index in range(request.n):
            self._ends[number, index] = asyncio.get_running_loop().create_future()
            self._tasks.append(asyncio.create_task(self._run(request, number, index, sink)))

    async def _run(self, request: Request, number: int, index: int, put: Sink) -> None:
        end = self._ends[number, index]
        if request.forwarded is not None:
            await self._forward(index, put)
            return
        is_scored = request.scheduling.kind == "score"
        reason: FinishReason = "complete" if is_scored else self.script_end or "length"
        num_tokens = 0
        if request.scheduling.kind == "pool":
            await asyncio.sleep(self.step_seconds)
            if number in self.cancelled_by:
                put(FinishedOutput(index, "cancelled", 0, cached_tokens=0, detail=self.cancelled_by[number]))
                return
            put(PooledOutput(index, spell_embedding(request.prompt_token_ids)))
            put(FinishedOutput(index, "complete", 0, cached_tokens=0))
            return
        self._put_prompt_logprobs(request, put, index)
        for step in [] if is_scored else self._steps(request, index):
            await asyncio.sleep(self.step_seconds)
            while self.num_said >= self.most_said and not end.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if end.done():
                break
            token_ids = step[: request.sampling.max_tokens - num_tokens]
            logprobs = spell_logprobs(token_ids, request.sampling.logprobs, request.sampling.logprob_token_ids)
            put(TokensOutput(index, num_tokens, token_ids, logprobs))
            num_tokens += len(token_ids)
            self.num_said += len(token_ids)
            if num_tokens == request.sampling.max_tokens:
                reason = "length"
                break
        if not end.done():
            if not request.scheduling.has_text_ends:
                end.set_result((reason, num_tokens))
            else:
                put(ClosingOutput(index, reason, num_tokens))
        told, position = await end
        finish = told or reason
        detail = self.cancelled_by.get(number, "")
        kept = num_tokens if position is None else position
        put(FinishedOutput(index, finish, kept, cached_tokens=4, detail=detail))

    async def _forward(self, index: int, put: Sink) -> None:
        num_tokens = 0
        for part in self.answer:
            await asyncio.sleep(self.step_seconds)
            match part:
                case AnswerDelta():
                    put(TextOutput(index, num_tokens, part))
                    num_tokens += part.num_tokens
                case AnswerEnd(reason, usage, stop_reason):
                    put(FinishedOutput(index, reason, num_tokens, 0, usage=usage, stop_reason=stop_reason))
                case BackendFailure():
                    put(FinishedOutput(index, "error", num_tokens, 0, failure=part))

    def _put_prompt_logprobs(self, request: Request, put: Sink, index: int) -> None:
        """In two chunks, the first of which comes again, as behind a preemption."""
        num_top = request.sampling.prompt_logprobs
        if num_top is None and request.scheduling.kind == "score":
            num_top = 0
        chunks = [request.prompt_token_ids[1:5], request.prompt_token_ids[5:]]
        starts = [1, 5]
        for which in (0, 0, 1):
            logprobs = spell_logprobs(chunks[which], num_top)
            if logprobs is not None and chunks[which]:
                put(PromptLogprobsOutput(index, starts[which], logprobs))

    def _steps(self, request: Request, index: int) -> Iterator[list[int]]:
        steps = self.script(request, index)
        yield from steps
        while self.script_end is None:
            yield steps[-1]

    def end_text(self, request: int, index: int, position: int, reason: str) -> None:
        self.text_ends.append((request, index, position, reason))
        end = self._ends[request, index]
        if not end.done():
            end.set_result((cast('FinishReason | Literal[""]', reason), position))

    def cancel(self, request: int, reason: str) -> None:
        self.cancelled.append((request, reason))
        self.cancelled_by.setdefault(request, reason)
        for (number, _), end in self._ends.items():
            if number == request and not end.done():
                end.set_result(("cancelled", None))
