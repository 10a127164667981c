"""The engine's interface in a front-end process: each method is a message. Does no I/O itself.

With `--recover` the front end outlives its engine. Its streams and calls pause then, until the next engine has taken
the run over and is ready. The streams go on after the outputs that they have had, and the calls are made again: also
a submission of which the next engine knows nothing, so nothing of it was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

from msgspec import Raw, structs

from eventlm.engine.admin import AdminAction, EngineStatus
from eventlm.engine.explanations import ExplainResponse
from eventlm.engine.object_store.actions import ObjectAction, Objects
from eventlm.engine.oldest_requests import OldestRequests
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import (
    RECOVERY_SECONDS,
    EngineUnavailableError,
    IdempotencyKey,
    OnOutput,
    Request,
    RequestHandle,
    ResumedReply,
    Submission,
)
from eventlm.engine.request_check import check_request
from eventlm.engine.request_registry import ReplyStatus
from eventlm.frontend.call_streams import CallStream, CallStreams, named
from eventlm.frontend.protocol import (
    Abandon,
    Administer,
    Call,
    CallError,
    CallOnObject,
    CallOnReply,
    CallResult,
    CancelRequest,
    ComeBack,
    EndText,
    FromFrontEnd,
    FrontEndSetup,
    GetMetrics,
    JoinReply,
    LeaveReply,
    ListOldest,
    MakeReport,
    Operation,
    Outputs,
    ResumeReply,
    ReturnedStream,
    StateChanged,
    Submit,
    Submitted,
    decode_result,
    encode,
    error_from,
)
from eventlm.metrics.components import EngineMetrics
from eventlm.system.clock import Clock

EngineState = Literal["loading", "ready", "draining", "dead"]
T = TypeVar("T")


class _Call(NamedTuple):
    """A call that waits for its answer. `take` decodes the result when it arrives; `abandon` undoes its effect if the
    caller has gone.
    """

    operation: Operation
    result: asyncio.Future[Any]
    take: Callable[[Raw], Any]
    abandon: Callable[[Any], None] | None


class RemoteEngine:
    """See `eventlm.text.engine.Engine`. `send` sends to the engine; `take` receives its messages."""

    def __init__(self, setup: FrontEndSetup, send: Callable[[FromFrontEnd], None], clock: Clock) -> None:
        self._clock = clock
        self.state = self._engine_state = cast(EngineState, setup.state)
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
        self._streams = CallStreams(send)
        #: Why the engine's process is unreachable.
        self._loss: EngineUnavailableError | None = None
        self._outlives_engine = bool(setup.config.record.recover)
        #: Set unless the engine has gone, and the next one is not ready or has not all streams yet.
        self.back = asyncio.Event()
        if not setup.goes_on:
            self.back.set()

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
            for handle in handles:
                handle.rate_limits = submitted.rate_limits
            self._streams.note_seqs(stream, submitted.requests)
            return handles

        def abandon(handles: list[RequestHandle]) -> None:
            if submission is not None and submission.stays_open:
                self.leave(submission.reply_id, 0)
            for handle in handles:
                handle.cancel()

        put = on_output or (lambda index, output: handles[index].put(output))
        stream = CallStream(put, [request.n for request in group], handles)
        if self._outlives_engine and submission is not None and not submission.search_tokens and not submission.goes_on:
            submission = structs.replace(submission, edge_returns=True)
            stream.returns(submission)
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
            self._streams.note_reader(stream, reply.submission.reply_id, reply.reader)
            return reply

        def abandon(reply: ResumedReply) -> None:
            self.leave(reply.submission.reply_id, reply.reader)

        # How much of the reply is over is unknown until the reader leaves.
        stream = CallStream(on_output, [])
        return await self._call(operation, take, stream=stream, abandon=abandon)

    def leave(self, reply_id: str, reader: int) -> None:
        """As the method of `InferenceEngine`."""
        reader = self._streams.leave(reply_id, reader)
        # The next engine has other numbers, and is told when it has the stream.
        if self.back.is_set():
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

    def take(self, message: Outputs | CallResult | CallError | StateChanged | FrontEndSetup) -> None:
        """Handle a message from the engine."""
        match message:
            case Outputs():
                self._streams.take(message)
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
                self._streams.forget(message.id)
                if isinstance(call.operation, ComeBack):
                    # None of them can go on.
                    call.take(Raw(encode([None] * len(call.operation.streams))))
                elif not call.result.done():
                    call.result.set_exception(error_from(message))
            case StateChanged() | FrontEndSetup():
                self._engine_state = cast(EngineState, message.state)
                self.paused = message.paused
                self.has_worker = message.has_worker
                self.num_waiting_for_room = message.num_waiting_for_room
                self.max_model_len = message.max_model_len
                self.models = message.models
                if isinstance(message, FrontEndSetup):
                    self.server_id = message.server_id
                if self._engine_state == "ready":
                    self._origin_ns = message.origin_ns
                if self.back.is_set():
                    self.state = self._engine_state
                elif self._engine_state == "ready":
                    self._come_back()

    def pause(self) -> None:
        """The engine's process has gone, and another one will go on: what can wait for it does."""
        self.state = self._engine_state = "loading"
        self.back.clear()
        error = EngineUnavailableError("the engine's process has died")
        for number, call in [*self._calls.items()]:
            match call.operation:
                case ComeBack() | Administer():
                    can_wait = False
                case Submit():
                    can_wait = self._streams.is_edge(number)
                case _:
                    can_wait = True
            if call.result.done() or not can_wait:
                del self._calls[number]
                self._streams.forget(number)
            if not call.result.done() and not can_wait:
                call.result.set_exception(error)
        self._streams.pause(self._calls, error)

    def _come_back(self) -> None:
        """The next engine is ready: name the streams to it."""
        streams = self._streams.returning()
        operation = ComeBack(named(streams))

        def take(result: Raw) -> None:
            for (number, stream), returned in zip(
                streams.items(), decode_result(result, list[ReturnedStream | None]), strict=True
            ):
                self._go_on(number, stream, returned)
            for number, call in [*self._calls.items()]:
                if call.result.done():
                    # The caller has gone.
                    del self._calls[number]
                    self._streams.forget(number)
                else:
                    self._send(Call(number, call.operation))
            self.state = self._engine_state
            self.back.set()

        self._num_calls += 1
        nobody: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        nobody.cancel()
        self._calls[self._num_calls] = _Call(operation, nobody, take, None)
        self._send(Call(self._num_calls, operation))

    def _go_on(self, number: int, stream: CallStream, returned: ReturnedStream | None) -> None:
        """Let a stream go on as the next engine says. A call that is still in `_calls` afterwards is made again."""
        if returned is None and number in self._calls and not stream.num_had:
            return
        call = self._calls.pop(number, None)
        if returned is None:
            error = EngineUnavailableError("the engine has died, and the reply is lost")
            self._streams.forget(number)
            stream.fail(error)
            if call is not None and not call.result.done():
                call.result.set_exception(error)
            return
        if stream.submission is not None:
            self._streams.note_seqs(stream, returned.requests)
        if call is not None and not call.result.done():
            call.result.set_result(stream.handles)
        elif call is not None and call.abandon is not None:
            call.abandon(stream.handles)
        self._streams.go_on(number, stream, returned)

    def fail(self, reason: str) -> None:
        """The engine's process has gone: fail everything that waits."""
        self.state = "dead"
        error = self._loss = EngineUnavailableError(reason)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.result.done():
                call.result.set_exception(error)
        self._streams.fail(error)
        self.back.set()

    def _end_text(self, request: int, index: int, position: int, reason: str) -> None:
        self._streams.tell(EndText(request, index, position, reason))

    def _cancel(self, request: int, reason: str) -> None:
        self._streams.tell(CancelRequest(request, reason))

    async def _call_for_long(self, operation: Operation, result_type: type[T]) -> T:
        """A call that may take long and that others wait for. If the caller leaves, the engine gets a cancel."""
        await self._until_back()
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
        stream: CallStream | None = None,
        abandon: Callable[[T], None] | None = None,
    ) -> T:
        """Send a call and wait for its result. Raises what the engine raises."""
        await self._until_back()
        self._num_calls += 1
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = _Call(operation, result, take, abandon)
        if stream is not None:
            self._streams.add(self._num_calls, stream)
        self._send(Call(self._num_calls, operation))
        return await result

    async def _until_back(self) -> None:
        """Wait for the next engine for a while, if there is none. Raises EngineUnavailableError."""
        if not self.back.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_SECONDS):
                    await self.back.wait()
        if self._loss is not None:
            raise self._loss
        if not self.back.is_set():
            raise EngineUnavailableError("the engine has died, and the next one is not ready yet; try again")
