"""The engine's end of the connection to one front-end process: answers calls and sends outputs, tick by tick."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
import structlog
from msgspec import structs

from eventlm.engine.object_store.actions import ChangeObject, PutObject
from eventlm.engine.request import (
    EngineUnavailableError,
    OnOutput,
    RequestOutput,
    ResumedReply,
    TakenOver,
    UnknownReplyError,
)
from eventlm.errors import EventLMError
from eventlm.frontend.protocol import (
    Abandon,
    Administer,
    Beat,
    Call,
    CallOnObject,
    CallOnReply,
    CallResult,
    CancelRequest,
    ComeBack,
    Draining,
    EndText,
    FrontEndFailed,
    FrontEndReady,
    GetMetrics,
    JoinReply,
    LeaveReply,
    ListOldest,
    Lost,
    MakeReport,
    Notification,
    Operation,
    Outputs,
    ResumeReply,
    ReturnedStream,
    ReturningStream,
    StreamOutput,
    Submit,
    Submitted,
    ToFrontEnd,
    call_error,
    call_result,
    decode_from_front_end,
    encode,
)
from eventlm.system.frames import FrameConnection

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine
    from eventlm.metrics.components import FrontEndMetrics

#: How much a front end may leave unread. Beyond this it counts as lost, because the backlog is in the engine's memory.
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
#: Before the first heartbeat.
NO_BEAT = Beat(num_requests=0, cpu_ns=0, resident_bytes=0)

log = structlog.get_logger("eventlm.front_end")


class FrontEndLink:
    """A connection to one front-end process. `lost` completes, with the reason, when the connection is unusable.

    metrics: returns those of all front ends. max_replay_bytes: allowance for the outputs of one resumed reply, on top
    of `max_backlog_bytes`.
    """

    def __init__(
        self,
        index: int,
        engine: InferenceEngine,
        metrics: Callable[[], list[FrontEndMetrics]],
        *,
        max_replay_bytes: int = 0,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = index
        self.started: asyncio.Future[FrontEndReady | FrontEndFailed] = loop.create_future()
        self.draining: asyncio.Future[int] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        #: Completes when it has named the streams that it had of an engine before.
        self.came_back: asyncio.Future[None] = loop.create_future()
        #: The last heartbeat, and how many there have been.
        self.beat = NO_BEAT
        self.num_beats = 0
        self._engine = engine
        self._metrics = metrics
        self._max_backlog_bytes = max_backlog_bytes
        self._max_replay_bytes = max_replay_bytes
        self._connection: FrameConnection | None = None
        #: The resumable replies and searches that this front end reads.
        self._reading: dict[LeaveReply, None] = {}
        #: Outputs collected in this tick.
        self._outputs: list[tuple[int, int, StreamOutput]] = []
        #: Running calls by their numbers.
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def open(self, end: socket.socket) -> None:
        """Connect over the engine's end of a socket pair."""
        self._connection = await FrameConnection.open(end, self._receive, partial(self.lose, "closed its connection"))

    def send(self, message: ToFrontEnd) -> None:
        """Send a message. The front end is lost if it leaves too much unread."""
        if self._connection is None or self.lost.done():
            return
        self._connection.send(encode(message))
        most_bytes = self._max_backlog_bytes + self._max_replay_bytes
        if self._connection.backlog_bytes > most_bytes:
            self.lose(f"left more than {most_bytes:,} bytes unread")

    def lose(self, reason: str) -> None:
        """Stop sending and receiving, and cancel the running calls."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        for task in self._answering.values():
            task.cancel()
        for leave in self._reading:
            self._notify(leave)
        self._outputs.clear()
        if self._connection is not None:
            self._connection.abort()

    def _receive(self, body: bytes) -> None:
        try:
            message = decode_from_front_end(body)
        except msgspec.DecodeError as error:
            self.lose(f"sent what cannot be read: {error}")
            return
        match message:
            case Call():
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._answering[message.id] = task
                task.add_done_callback(lambda _: self._answering.pop(message.id))
            case Abandon():
                if message.id in self._answering:
                    self._answering[message.id].cancel()
            case CancelRequest() | EndText() | LeaveReply():
                if isinstance(message, LeaveReply):
                    self._reading.pop(message, None)
                self._notify(message)
            case Beat():
                self.beat = message
                self.num_beats += 1
            case Draining():
                if not self.draining.done():
                    self.draining.set_result(message.num_requests)
            case FrontEndReady() | FrontEndFailed():
                if not self.started.done():
                    self.started.set_result(message)

    async def _answer(self, call: Call) -> None:
        try:
            self._check_room(call)
            result = await self._carry_out(call.operation, partial(self._put, call.id))
            answer = call_result(call.id, result)
            self._check_fits(call, answer)
        except EventLMError as error:
            self.send(call_error(call.id, error))
            return
        except Exception:
            log.exception("a call failed: this is a defect, please report it", front_end=self.index)
            self.send(call_error(call.id, EngineUnavailableError("the engine could not answer; see the server's log")))
            return
        if isinstance(result, ResumedReply):
            self._reading[LeaveReply(result.submission.reply_id, result.reader)] = None
        elif isinstance(call.operation, Submit):
            submission = call.operation.submission
            if submission is not None and submission.stays_open:
                self._reading[LeaveReply(submission.reply_id, 0)] = None
        self.send(answer)
        if isinstance(result, ResumedReply):
            # Its outputs are here already. Send them now: they count when the next resumption is checked.
            self._flush()

    async def _carry_out(self, operation: Operation, on_output: OnOutput) -> Any:
        """Returns a result that msgpack can encode. Raises what the engine raises."""
        engine = self._engine
        match operation:
            case Submit(group=group, submission=submission):
                marked = [request.with_scheduling(front_end=self.index) for request in group]
                handles = await engine.submit(marked, submission=submission, on_output=on_output)
                return Submitted([handle.request for handle in handles], handles[0].rate_limits if handles else None)
            case ResumeReply(reply_id=reply_id, owner=owner, limits=limits):
                return await engine.resume(reply_id, owner, on_output, limits)
            case JoinReply(key=key, owner=owner, limits=limits):
                return await engine.join(key, owner, on_output, limits)
            case ComeBack(streams=streams):
                return self._come_back(streams)
            case CallOnReply(method=method, reply_id=reply_id, owner=owner):
                return await getattr(engine, method)(reply_id, owner)
            case GetMetrics():
                return structs.replace(await engine.read_metrics(), front_ends=self._metrics())
            case ListOldest(limit=limit):
                return await engine.list_oldest(limit)
            case MakeReport(seconds=seconds):
                return await engine.report(seconds)
            case Administer(action=action):
                return await engine.administer(action)
            case CallOnObject(action=action):
                if isinstance(action, PutObject | ChangeObject):
                    action = structs.replace(action, holder=self.index)
                return await engine.object_store.carry_out(action)
            case _:
                assert_never(operation)

    def _come_back(self, streams: list[ReturningStream]) -> list[ReturnedStream | None]:
        """Let streams of the engine before go on."""
        results: list[ReturnedStream | None] = []
        for stream in streams:
            put = partial(self._put, stream.number)
            try:
                requests, reader = self._engine.come_back(
                    stream.reply_id, put, stream.num_had, self.index, is_edge=stream.is_edge
                )
            except UnknownReplyError:
                results.append(None)
                continue
            self._reading[LeaveReply(stream.reply_id, reader)] = None
            results.append(ReturnedStream(requests, reader))
        if not self.came_back.done():
            self.came_back.set_result(None)
        return results

    def _notify(self, notification: Notification) -> None:
        """Pass on a notification. The request it concerns may have ended already."""
        match notification:
            case CancelRequest(request=request, reason=reason):
                self._engine.cancel(request, reason)
            case EndText(request=request, index=index, position=position, reason=reason):
                self._engine.end_text(request, index, position, reason)
            case LeaveReply(reply_id=reply_id, reader=reader):
                self._engine.leave(reply_id, reader)
            case _:
                assert_never(notification)

    def _check_room(self, call: Call) -> None:
        """Let one resumed reply at a time exceed the bound: a client that resumes many harms no other stream."""
        if not isinstance(call.operation, ResumeReply | JoinReply) or self._connection is None:
            return
        if self._connection.backlog_bytes > self._max_backlog_bytes:
            raise EngineUnavailableError("too much is on its way to be sent; try again")

    def _check_fits(self, call: Call, answer: CallResult) -> None:
        """Refuse to send a large object over the bound: a client that reads many harms no stream."""
        if not isinstance(call.operation, CallOnObject | MakeReport) or self._connection is None:
            return
        if self._connection.backlog_bytes + len(answer.result) > self._max_backlog_bytes:
            raise EngineUnavailableError("too much is on its way to be sent; try again")

    def _put(self, call: int, index: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """Collect an output. All outputs of one tick leave in one message after it."""
        if self.lost.done():
            return
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        sent: StreamOutput = Lost(str(output)) if isinstance(output, EventLMError) else output
        self._outputs.append((call, index, sent))

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self.send(Outputs(outputs))
