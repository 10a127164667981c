"""The engine's interface in a front-end process: each method is a message. Does no I/O itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

from msgspec import Raw

from eventlm.engine.admin import AdminAction, EngineStatus
from eventlm.engine.explanations import ExplainResponse
from eventlm.engine.object_store.actions import ObjectAction, Objects
from eventlm.engine.oldest_requests import OldestRequests
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import (
    EngineUnavailableError,
    FinishedOutput,
    IdempotencyKey,
    OnOutput,
    Request,
    RequestHandle,
    ResumedReply,
    Submission,
)
from eventlm.engine.request_check import check_request
from eventlm.engine.request_registry import ReplyStatus
from eventlm.frontend.protocol import (
    Abandon,
    Administer,
    Call,
    CallError,
    CallOnObject,
    CallOnReply,
    CallResult,
    CancelRequest,
    EndText,
    FromFrontEnd,
    FrontEndSetup,
    GetMetrics,
    JoinReply,
    LeaveReply,
    ListOldest,
    Lost,
    MakeReport,
    Operation,
    Outputs,
    ResumeReply,
    StateChanged,
    Submit,
    Submitted,
    decode_result,
    error_from,
)
from eventlm.metrics.components import EngineMetrics
from eventlm.system.clock import Clock

EngineState = Literal["loading", "ready", "draining", "dead"]
T = TypeVar("T")


class _Stream:
    """Where a call's outputs go. `num_left`: the unfinished sequences of each of its requests."""

    __slots__ = ("num_left", "on_output")

    def __init__(self, on_output: OnOutput, num_left: list[int]) -> None:
        self.on_output = on_output
        self.num_left = num_left


class _Call(NamedTuple):
    """A call that waits for its answer. `take` decodes the result when it arrives; `abandon` undoes its effect if the
    caller has gone.
    """

    result: asyncio.Future[Any]
    take: Callable[[Raw], Any]
    abandon: Callable[[Any], None] | None


class RemoteEngine:
    """See `eventlm.text.engine.Engine`. `send` sends to the engine; `take` receives its messages."""

    def __init__(self, setup: FrontEndSetup, send: Callable[[FromFrontEnd], None], clock: Clock) -> None:
        self._clock = clock
        self.state = cast(EngineState, setup.state)
        self.paused = setup.paused
        self.has_worker = setup.has_worker
        self.num_waiting_for_room = setup.num_waiting_for_room
        self.server_id = setup.server_id
        self.max_model_len = setup.max_model_len
        self.model_names = setup.model_names
        self.models = setup.models
        self._vocab_sizes = {name: each.vocab_size for each in setup.others for name in each.model_names}
        self.objects = Objects(self._call_on_object)
        self._vocab_size = setup.vocab_size
        self._origin_ns = setup.origin_ns
        self._send = send
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._streams: dict[int, _Stream] = {}
        #: The streams of resumed replies, by reply id and reader number.
        self._reading: dict[tuple[str, int], _Stream] = {}
        #: Why the engine's process is unreachable.
        self._loss: EngineUnavailableError | None = None

    def now_ns(self) -> int:
        """The run's clock. Both processes read the host's monotonic clock."""
        return self._clock.monotonic_ns() - self._origin_ns

    async def read_metrics(self) -> EngineMetrics:
        """The metrics of the engine and of every front end. Raises EngineUnavailableError."""
        return await self._call(GetMetrics(), partial(decode_result, result_type=EngineMetrics))

    async def submit(
        self,
        group: Sequence[Request],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        """As `InferenceEngine.submit`. Checks that need only the request itself are made here."""
        for request in group:
            model = request.scheduling.model
            longest = self.models[model].max_model_len if model in self.models else self.max_model_len
            check_request(request, max_model_len=longest, vocab_size=self._vocab_sizes.get(model, self._vocab_size))
        handles = [
            RequestHandle(-1, request.n, self._end_text, self._cancel, put=on_output and partial(on_output, index))
            for index, request in enumerate(group)
        ]

        def take(result: Raw) -> list[RequestHandle]:
            submitted = decode_result(result, Submitted)
            for handle, seq in zip(handles, submitted.requests, strict=True):
                handle.request = seq
                handle.rate_limits = submitted.rate_limits
            return handles

        def abandon(handles: list[RequestHandle]) -> None:
            if submission is not None and submission.stays_open:
                self.leave(submission.reply_id, 0)
            for handle in handles:
                handle.cancel()

        put = on_output or (lambda index, output: handles[index].put(output))
        stream = _Stream(put, [request.n for request in group])
        return await self._call(Submit(list(group), submission), take, stream=stream, abandon=abandon)

    async def resume(
        self, reply_id: str, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """As the method of `InferenceEngine`."""
        return await self._read_again(ResumeReply(reply_id, owner, limits), on_output)

    async def join(
        self, key: IdempotencyKey, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """As the method of `InferenceEngine`."""
        return await self._read_again(JoinReply(key, owner, limits), on_output)

    async def _read_again(self, operation: ResumeReply | JoinReply, on_output: OnOutput) -> ResumedReply:
        def take(result: Raw) -> ResumedReply:
            reply = decode_result(result, ResumedReply)
            self._reading[reply.submission.reply_id, reply.reader] = stream
            return reply

        def abandon(reply: ResumedReply) -> None:
            self.leave(reply.submission.reply_id, reply.reader)

        # How much of the reply is over is unknown until the reader leaves.
        stream = _Stream(on_output, [])
        return await self._call(operation, take, stream=stream, abandon=abandon)

    def leave(self, reply_id: str, reader: int) -> None:
        """As the method of `InferenceEngine`."""
        stream = self._reading.pop((reply_id, reader), None)
        if stream is not None:
            self._streams = {number: each for number, each in self._streams.items() if each is not stream}
        self._send(LeaveReply(reply_id, reader))

    async def cancel_reply(self, reply_id: str, owner: str) -> bool:
        """As the method of `InferenceEngine`."""
        return await self._call(CallOnReply("cancel_reply", reply_id, owner), partial(decode_result, result_type=bool))

    async def administer(self, action: AdminAction) -> EngineStatus:
        """As the method of `InferenceEngine`."""
        return await self._call(Administer(action), partial(decode_result, result_type=EngineStatus))

    async def status(self, reply_id: str, owner: str | None) -> ReplyStatus:
        """As the method of `InferenceEngine`."""
        return await self._call(CallOnReply("status", reply_id, owner), partial(decode_result, result_type=ReplyStatus))

    async def explain(self, reply_id: str, owner: str) -> ExplainResponse:
        """As the method of `InferenceEngine`."""
        return await self._call_for_long(CallOnReply("explain", reply_id, owner), ExplainResponse)

    async def list_oldest(self, limit: int) -> OldestRequests:
        """As the method of `InferenceEngine`."""
        return await self._call(ListOldest(limit), partial(decode_result, result_type=OldestRequests))

    async def report(self, seconds: int) -> bytes:
        """As the method of `InferenceEngine`."""
        return await self._call_for_long(MakeReport(seconds), bytes)

    async def _call_on_object(self, action: ObjectAction) -> Any:
        return await self._call(CallOnObject(action), partial(decode_result, result_type=action.result_type))

    def take(self, message: Outputs | CallResult | CallError | StateChanged) -> None:
        """Handle a message from the engine."""
        match message:
            case Outputs():
                self._take_outputs(message)
            case CallResult() | CallError() if message.id not in self._calls:
                # The call was abandoned while this was on its way.
                pass
            case CallResult():
                call = self._calls.pop(message.id)
                result = call.take(message.result)
                if not call.result.done():
                    call.result.set_result(result)
                elif call.abandon is not None:
                    call.abandon(result)
            case CallError():
                call = self._calls.pop(message.id)
                self._streams.pop(message.id, None)
                if not call.result.done():
                    call.result.set_exception(error_from(message))
            case StateChanged():
                self.state = cast(EngineState, message.state)
                self.paused = message.paused
                self.has_worker = message.has_worker
                self.num_waiting_for_room = message.num_waiting_for_room
                self.max_model_len = message.max_model_len
                self.models = message.models

    def fail(self, reason: str) -> None:
        """The engine's process has gone: fail everything that waits."""
        self.state = "dead"
        error = self._loss = EngineUnavailableError(reason)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.result.done():
                call.result.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            for index, num_left in enumerate(stream.num_left or [1]):
                if num_left:
                    stream.on_output(index, error)

    def _take_outputs(self, outputs: Outputs) -> None:
        streams = self._streams
        for call, index, output in outputs.items:
            stream = streams.get(call)
            if stream is None:
                continue
            if isinstance(output, Lost):
                self._count_off(call, stream, index, all_at_once=True)
                stream.on_output(index, EngineUnavailableError(output.message))
                continue
            stream.on_output(index, output)
            if isinstance(output, FinishedOutput):
                self._count_off(call, stream, index)

    def _count_off(self, call: int, stream: _Stream, index: int, *, all_at_once: bool = False) -> None:
        if stream.num_left:
            stream.num_left[index] -= stream.num_left[index] if all_at_once else 1
            if not any(stream.num_left):
                del self._streams[call]

    def _end_text(self, request: int, index: int, position: int, reason: str) -> None:
        self._send(EndText(request, index, position, reason))

    def _cancel(self, request: int, reason: str) -> None:
        self._send(CancelRequest(request, reason))

    async def _call_for_long(self, operation: Operation, result_type: type[T]) -> T:
        """A call that may take long and that others wait for. If the caller leaves, the engine gets a cancel."""
        number = self._num_calls + 1
        try:
            return await self._call(operation, partial(decode_result, result_type=result_type))
        except asyncio.CancelledError:
            if self._calls.pop(number, None) is not None:
                self._send(Abandon(number))
            raise

    async def _call(
        self,
        operation: Operation,
        take: Callable[[Raw], T],
        *,
        stream: _Stream | None = None,
        abandon: Callable[[T], None] | None = None,
    ) -> T:
        """Send a call and wait for its result. Raises what the engine raises."""
        if self._loss is not None:
            raise self._loss
        self._num_calls += 1
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = _Call(result, take, abandon)
        if stream is not None:
            self._streams[self._num_calls] = stream
        self._send(Call(self._num_calls, operation))
        return await result
