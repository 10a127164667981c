"""Runs the lines of a batch as ordinary requests: prepared, submitted and answered as those that come by HTTP.

A bounded number of sequences is under way at once. Lines are submitted one after the other, in their order, and each
waits for whatever passes: a full queue, a limit of its key, an engine that loads or drains, a worker that was lost.
A line whose conversation another one uses waits by itself, and others overtake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any

import structlog
from msgspec import structs

from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import EventLMError, InputError
from eventlm.scheduling_params import LOWEST_PRIORITY
from eventlm.server.api import Api, Caller, Exchange, decode_body
from eventlm.server.auth.api_keys import Principal
from eventlm.server.batches.lines import InputLine, OutputLine, with_response, without_response
from eventlm.server.batches.window import Window
from eventlm.server.context import ServerContext
from eventlm.server.errors import ApiError, api_error, internal_error
from eventlm.server.http.connection import SANE_REQUEST_ID
from eventlm.text.generation import Generation

_log = structlog.get_logger("eventlm.batches")

#: How long to wait for what does not say when it passes.
RETRY_SECONDS = 1.0
#: After an owner: where the use of its batches is counted.
_ACCOUNT = "/batch"
#: Code of the error of a response whose conversation has another one under way.
_LOCKED = "conversation_locked"
#: Most lines that wait for their conversations; the next ones wait for one of these.
MAX_LOCKED_LINES = 64
#: Statuses of errors that pass, unless they say otherwise.
_PASSING = (429, 503)
#: After all interactive requests and without deadlines, no matter what the line or the class of its key asks for.
BATCH_SCHEDULING: dict[str, Any] = {
    "priority": LOWEST_PRIORITY,
    "deadline_ns": 0,
    "slo_ttft_ns": 0,
    "slo_tpot_ns": 0,
    "drop_if_late": False,
}

Record = Callable[[OutputLine], Awaitable[None]]


class _Running:
    """A line that was submitted. A drain waits for its `end`."""

    def __init__(
        self,
        context: ServerContext,
        give_room: Callable[[], None],
        api: Api[Any],
        exchange: Exchange,
        generation: Generation,
    ) -> None:
        self.has_ended = False
        self._context = context
        self._give_room = give_room
        self._api = api
        self._exchange = exchange
        self._generation = generation

    async def reply(self) -> object:
        """The reply, once it is whole. Raises what ended it."""
        exchange = self._exchange
        reply = await exchange.whole(self._generation)
        await self._api.ended(self._context, exchange.body, exchange.submission.owner, exchange.reply_format)
        return reply

    async def end(self) -> None:
        """What became of it was recorded, or it is given up. A second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            self._context.release(self._generation)
            self._context.leave()
            self._give_room()
            await self._api.close()


class LineRunner:
    """Runs the lines of one batch.

    apis: by the url of lines. principal: the holder of the batch's key, None while there is no such key. batch_id:
    before a custom_id in the ids of requests. prefix: of the ids of output lines. scheduling: fields of all requests.
    max_at_once: most sequences of one line; None for no limit.
    """

    def __init__(
        self,
        context: ServerContext,
        apis: Mapping[str, Api[Any]],
        window: Window,
        principal: Callable[[], Principal | None],
        *,
        batch_id: str,
        prefix: str,
        scheduling: Mapping[str, Any],
        max_at_once: int | None = None,
    ) -> None:
        self._context = context
        self._apis = apis
        self._window = window
        self._principal = principal
        self._batch_id = batch_id
        self._prefix = prefix
        self._scheduling = scheduling
        self._max_at_once = max_at_once
        self._turn = asyncio.Lock()
        self._locked_lines = asyncio.Semaphore(MAX_LOCKED_LINES)
        self._ends: set[asyncio.Future[None]] = set()

    async def run(self, lines: Iterator[InputLine], ended: Container[int], record: Record) -> None:
        """Run the lines whose numbers are not in `ended`; `record` gets what became of each.

        lines: is iterated over in other threads. Raises what `record` raises, and EngineUnavailableError if the engine
        has died. If it is cancelled, it ends the requests that are under way.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    if line.number in ended:
                        continue
                    async with self._turn:
                        started = await self._start(line)
                    if isinstance(started, OutputLine):
                        await record(started)
                        continue
                    if started is None:
                        await self._locked_lines.acquire()
                    task = tasks.create_task(self._finish(line, started, record))
                    # A task that is cancelled before its first step does nothing.
                    task.add_done_callback(partial(self._give_up, started))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _give_up(self, started: _Running | None, _: object) -> None:
        if started is None:
            self._locked_lines.release()
        elif not started.has_ended:
            end = asyncio.ensure_future(started.end())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _finish(self, line: InputLine, started: _Running | OutputLine | None, record: Record) -> None:
        while not isinstance(started, OutputLine):
            if started is None:
                # The end of another line may be what this one waits for.
                await self._window.wait_for_change(RETRY_SECONDS)
            else:
                try:
                    output = await self._result(line, started)
                    if output is not None:
                        await record(output)
                        return
                finally:
                    await started.end()
            async with self._turn:
                started = await self._start(line)
        await record(started)

    async def _start(self, line: InputLine) -> _Running | OutputLine | None:
        """Submit a line as soon as possible; its output if it cannot be; None while its conversation is in use."""
        if line.error is not None:
            return without_response(self._prefix, line, line.error)
        request_id = self._request_id(line)
        while True:
            seconds = RETRY_SECONDS
            try:
                self._context.check_available()
                if (principal := self._principal()) is not None:
                    return await self._submit(line, Caller(principal, request_id))
            except Exception as failure:
                error = self._reported(failure)
                if error.envelope.error.code == _LOCKED:
                    return None
                if not _passes(error):
                    return with_response(self._prefix, line, request_id, error)
                if error.status == 429:
                    seconds = float(error.headers.get("Retry-After", RETRY_SECONDS))
            # The end of another line may be what this one waits for.
            await self._window.wait_for_change(seconds)

    async def _submit(self, line: InputLine, caller: Caller) -> _Running:
        api = self._apis[line.url]
        body = decode_body(self._context, api, line.body)
        context = self._context.of_model(body.model)
        # What the requests are scheduled by is decided below, so that not even the class of the key has a say.
        body.priority, body.deadline_ms, body.slo, body.drop_if_late = None, None, None, False
        # A line that waits for room must not hold what its key's holder may need, such as a conversation.
        await self._window.take(1)
        num_taken = 1
        try:
            api = await api.begin_line(context, body, caller)
        except BaseException:
            self._window.give(num_taken)
            raise
        try:
            exchange = await Exchange.prepare(context, api, body, line.body, caller, context.engine.now_ns())
            group = [request.with_scheduling(**self._scheduling) for request in exchange.group]
            # A batch must not lock its key's holder out.
            submission = structs.replace(exchange.submission, account=f"{caller.principal.owner}{_ACCOUNT}")
            exchange = exchange._replace(group=group, submission=submission)
            if (num_sequences := self._num_at_once(exchange)) > 1:
                self._window.give(num_taken)
                num_taken = 0
                await self._window.take(num_sequences)
                num_taken = num_sequences
            generation = await self._generation(exchange)
        except BaseException:
            self._window.give(num_taken)
            await api.close()
            raise
        return _Running(context, partial(self._window.give, num_taken), api, exchange, generation)

    def _num_at_once(self, exchange: Exchange) -> int:
        """How many sequences of a line run at once. Raises InputError if those are too many."""
        found, most = sum(request.num_at_once for request in exchange.group), self._max_at_once
        if most is not None and found > most:
            message = (
                f"This line has {found} sequences at once, by its prompts and its n or beams; a line of a batch may "
                f"have at most {most}. Split it, or start the server with a larger --batch-window."
            )
            raise InputError(exchange.reply_format.prompt_param, message)
        return found

    async def _generation(self, exchange: Exchange) -> Generation:
        """Submit it. A drain waits for it from then on."""
        # There may be a drain by now.
        self._context.check_available()
        self._context.enter()
        try:
            return await exchange.submit(self._context)
        except BaseException:
            self._context.leave()
            raise

    async def _result(self, line: InputLine, running: _Running) -> OutputLine | None:
        """What became of a line; None if it must be run again."""
        try:
            reply = await running.reply()
        except Exception as failure:
            error = self._reported(failure)
            return None if _passes(error) else with_response(self._prefix, line, self._request_id(line), error)
        return with_response(self._prefix, line, self._request_id(line), reply)

    def _request_id(self, line: InputLine) -> str:
        """`BATCH/CUSTOM_ID`, by which the request can be looked up; with the line's number if that is no valid id."""
        request_id = f"{self._batch_id}/{line.custom_id}"
        return request_id if SANE_REQUEST_ID.fullmatch(request_id) else f"{self._batch_id}/{line.number}"

    def _reported(self, failure: Exception) -> ApiError:
        """An error as the line's client gets it. Raises EngineUnavailableError if the engine has died."""
        if self._context.engine.state == "dead":
            raise EngineUnavailableError("the engine has died; see the log above") from failure
        if isinstance(failure, EventLMError):
            return api_error(failure)
        _log.exception("a line of a batch failed", exc_info=failure)
        return internal_error()


def _passes(error: ApiError) -> bool:
    """Whether the same request may succeed later."""
    return error.status in _PASSING and error.headers.get("x-should-retry") != "false"
