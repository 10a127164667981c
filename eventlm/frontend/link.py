"""The engine's end of the connection to one front-end process: answers calls and sends outputs, tick by tick."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import msgspec
import structlog

from eventlm.engine.request import EngineUnavailableError, RequestOutput, ResumedReply, TakenOver
from eventlm.errors import EventLMError
from eventlm.frontend.calls import FrontEndCalls
from eventlm.frontend.frames import FrameConnection
from eventlm.frontend.protocol import (
    Abandon,
    Beat,
    Call,
    CancelRequest,
    Draining,
    EndText,
    FrontEndFailed,
    FrontEndReady,
    LeaveReply,
    Lost,
    Outputs,
    ResumeReply,
    StreamOutput,
    Submit,
    ToFrontEnd,
    call_error,
    call_result,
    decode_from_front_end,
    encode,
)

#: How much a front end may leave unread. Beyond this it counts as lost, because the backlog is in the engine's memory.
MAX_BACKLOG_BYTES = 64 * 1024 * 1024

log = structlog.get_logger("eventlm.front_end")


class FrontEndLink:
    """A connection to one front-end process. `lost` completes, with the reason, when the connection is unusable.

    max_replay_bytes: allowance for the outputs of one resumed reply, on top of `max_backlog_bytes`.
    """

    def __init__(
        self,
        index: int,
        calls: FrontEndCalls,
        *,
        max_replay_bytes: int = 0,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.index = index
        self.started: asyncio.Future[FrontEndReady | FrontEndFailed] = loop.create_future()
        self.draining: asyncio.Future[int] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        #: The last heartbeat, and how many there have been.
        self.beat = Beat(num_requests=0, cpu_ns=0, resident_bytes=0)
        self.num_beats = 0
        self._calls = calls
        self._max_backlog_bytes = max_backlog_bytes
        self._max_replay_bytes = max_replay_bytes
        self._connection: FrameConnection | None = None
        #: The resumable replies that this front end reads.
        self._reading: set[LeaveReply] = set()
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
            self._calls.notify(leave)
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
                    self._reading.discard(message)
                self._calls.notify(message)
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
            result = await self._calls.answer(self.index, call.operation, partial(self._put, call.id))
        except EventLMError as error:
            self.send(call_error(call.id, error))
            return
        except Exception:
            log.exception("a call failed: this is a defect, please report it", front_end=self.index)
            self.send(call_error(call.id, EngineUnavailableError("the engine could not answer; see the server's log")))
            return
        if isinstance(result, ResumedReply):
            self._reading.add(LeaveReply(result.submission.reply_id, result.reader))
        elif isinstance(call.operation, Submit):
            submission = call.operation.submission
            if submission is not None and submission.is_resumable:
                self._reading.add(LeaveReply(submission.reply_id, 0))
        self.send(call_result(call.id, result))
        if isinstance(result, ResumedReply):
            # Its outputs are here already. Send them now, so that they count before the next resumption is checked.
            self._flush()

    def _check_room(self, call: Call) -> None:
        """Let one resumed reply at a time exceed the bound: a client that resumes many harms no other stream."""
        if not isinstance(call.operation, ResumeReply) or self._connection is None:
            return
        if self._connection.backlog_bytes > self._max_backlog_bytes:
            raise EngineUnavailableError("too much is on its way to be sent; try again")

    def _put(self, call: int, place: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """Collect an output. All outputs of one tick leave in one message after it."""
        if self.lost.done():
            return
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        sent: StreamOutput = Lost(str(output)) if isinstance(output, EventLMError) else output
        self._outputs.append((call, place, sent))

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            self.send(Outputs(outputs))
