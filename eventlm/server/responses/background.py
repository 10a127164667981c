"""Responses with `background`: generated without their client, which asks for them or reads their stream later."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import structs

from eventlm.engine.object_store.actions import UnknownObjectError
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import ResumedReply, UnknownReplyError
from eventlm.errors import EventLMError
from eventlm.server.answer import Received, caller, read_events, send_events
from eventlm.server.api import APIS, Api, Exchange, edge_state, stream_again
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, ServerContext, json_response
from eventlm.server.errors import ApiError, api_error
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import ANSWERED_BY, GENERATION
from eventlm.server.model_rules import submit
from eventlm.server.reply_format import StreamFormat
from eventlm.server.request_log import request_fields
from eventlm.server.responses.protocol import ResponsesRequest
from eventlm.server.responses.replies import Response
from eventlm.server.responses.stored import RESPONSE, StoredResponse
from eventlm.server.responses.stream import ResponseReplies
from eventlm.server.responses.turn import Turn
from eventlm.server.stream_events import StreamEvents
from eventlm.text import generation as generations
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.generation import Generation

#: How long the last events of a stream wait until the response is kept as it ended.
KEPT_SECONDS = 10.0


async def run_in_background(
    request: web.Request, api: Api[ResponsesRequest], received: Received[ResponsesRequest], turn: Turn
) -> web.StreamResponse:
    """Submit a response and answer before it has begun. Ends the turn, now or when the response is over. Raises
    KeyTakenError.
    """
    body, data, received_ns = received
    try:
        context, _, exchange, generation, answered_by = await submit(
            request.app[CONTEXT], api, body, data, caller(request), received_ns
        )
    except BaseException:
        await turn.end()
        raise
    request[GENERATION] = generation
    request[ANSWERED_BY] = answered_by
    assert isinstance(exchange.reply_format, ResponseReplies)
    queued = exchange.reply_format.response
    try:
        await turn.begin_to_keep(queued)
    except BaseException:
        context.engine.leave(queued.id, 0)
        context.release(generation)
        await turn.end()
        raise
    context.run_on(generation, _run(context, exchange, turn, generation), request_fields(request), received_ns)
    return await _show(request, exchange, queued)


async def show_begun(
    request: web.Request, api: Api[ResponsesRequest], reply: ResumedReply, generation: Generation
) -> web.StreamResponse:
    """Answer as `run_in_background` did."""
    exchange = Exchange.again(request.app[CONTEXT], api, reply, edge_state(reply))
    assert isinstance(exchange.reply_format, ResponseReplies)
    return await _show(request, exchange, exchange.reply_format.response)


async def _show(request: web.Request, exchange: Exchange, queued: Response) -> web.StreamResponse:
    if exchange.stream is None:
        return json_response(queued)
    return await stream_response(request, queued.id, after=-1, limits=NO_LIMITS)


async def stream_response(
    request: web.Request, id: str, *, after: int, limits: RateLimits | None = None
) -> web.StreamResponse:
    """Send the events of a response in the background that come after the event number `after`, up to its end."""
    context, principal = request.app[CONTEXT], request[PRINCIPAL]
    limits = principal.limits if limits is None else limits
    try:
        reply, generation = await generations.resume(
            context.engine, context.tokenizer, id, principal.owner, context.formats, limits, context.text_of
        )
    except UnknownReplyError as error:
        raise ApiError(
            409,
            f"The events of the response '{id}' are no longer kept; retrieve it without 'stream'.",
            param="stream",
            should_retry=False,
        ) from error
    request.setdefault(GENERATION, generation)
    context.enter()
    try:
        replies = stream_again(context, request.app[APIS], reply, generation)
        events = StreamEvents(generation, _EventsAfter(replies, after), has_ids=False)
        stream = EventStream(request, context.config, events.framing.media_type)
        # The client needs the response's id before anything is generated.
        await stream.start()
        stream.send(events.begin())
        return await send_events(
            stream, events, generation, partial(_until_kept, context, id, principal.owner, generation)
        )
    finally:
        context.leave()
        context.engine.leave(reply.submission.reply_id, reply.reader)


class _EventsAfter(StreamFormat):
    """A stream without the events up to number `after`."""

    def __init__(self, inner: StreamFormat, after: int) -> None:
        self.identity = inner.identity
        self.framing = inner.framing
        self._inner = inner
        self._after = after

    def begin(self, generation: Generation) -> Sequence[Any]:
        return self._later(self._inner.begin(generation))

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        return self._later(self._inner.events(output, generation))

    def end(self, generation: Generation) -> Sequence[Any]:
        return self._later(self._inner.end(generation))

    def failure(self, error: ApiError) -> Sequence[Any]:
        # The client may have got later ones than were made again until now.
        return [
            structs.replace(event, sequence_number=max(event.sequence_number, self._after))
            for event in self._inner.failure(error)
        ]

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        return await self._inner.whole(choices, generation)

    def _later(self, events: Sequence[Any]) -> Sequence[Any]:
        return [event for event in events if event.sequence_number > self._after]


async def _run(context: ServerContext, exchange: Exchange, turn: Turn, generation: Generation) -> ApiError | None:
    """Read a response to its end and keep it as it ended. Returns the error that ended it."""
    replies = exchange.reply_format
    assert isinstance(replies, ResponseReplies)
    try:
        events = StreamEvents(generation, replies, has_ids=False)
        return await read_events(events, generation, partial(_keep, turn, replies))
    finally:
        context.engine.leave(exchange.submission.reply_id, 0)
        await turn.end()


async def _keep(turn: Turn, replies: ResponseReplies) -> None:
    """Keep a response as it ended; as failed, with its output if there is room, if it cannot be kept so."""
    try:
        await turn.keep(replies.response)
    except EventLMError as failure:
        replies.failure(api_error(failure))
        for response in (replies.response, structs.replace(replies.response, output=[])):
            with contextlib.suppress(EventLMError):
                await turn.keep(response)
                break
        raise


async def _until_kept(context: ServerContext, id: str, owner: str, generation: Generation) -> None:
    """Wait until a response that has ended is kept, so that a client that has its last event can go on with it.

    Raises ApiError if it could not be kept as it ended.
    """
    if not generation.is_over:
        # Another reader has taken over.
        return
    with contextlib.suppress(UnknownObjectError):
        found = await context.engine.objects.get(RESPONSE, id, owner, wait_seconds=KEPT_SECONDS)
        error = StoredResponse.decode(found.data).head.error
        if error is not None:
            raise ApiError(500 if error.code == "server_error" else 400, error.message)
