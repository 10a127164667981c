"""`/v1/stream/{id}`: clients that lost the connection of their stream resume it."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from eventlm.engine.request import ResumedReply, UnknownReplyError
from eventlm.errors import InputError
from eventlm.server.answer import send_events
from eventlm.server.api import APIS, stream_again
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import reply_not_found, stream_rewound
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import GENERATION
from eventlm.server.reply_format import SERVER_SENT_EVENTS
from eventlm.server.stream_events import EVENT_ID_PATTERN, StreamEvents, StreamPosition
from eventlm.text import generation as generations
from eventlm.text.generation import MAX_OUTPUTS_TAKEN, Generation

LAST_EVENT_ID = "Last-Event-ID"
FROM = "from"
EventId = Annotated[str, Meta(pattern=EVENT_ID_PATTERN)]


class CancelledReply(Struct, frozen=True, kw_only=True):
    """A reply that is no longer kept. cancelled: it was running; else it was over."""

    id: str
    object: str = "stream"
    cancelled: bool


async def resume_stream(request: web.Request) -> web.StreamResponse:
    """Resume a stream whose connection was lost. It counts as a request against the key's limits, without tokens.

    `Last-Event-ID`, or else `from`, is the id of the last event that the client received; without it the stream begins
    at its start. 204 if the client has received everything. Another reader of the stream gets an error, unless the
    request had an `Idempotency-Key`.
    """
    if request.method == "HEAD":
        # It would take the stream from its reader and discard it.
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "DELETE"])
    context = request.app[CONTEXT]
    position = _position(request)
    context.check_loaded()
    context.enter()
    try:
        return await _resume(request, position)
    finally:
        context.leave()


async def cancel_stream(request: web.Request) -> web.Response:
    """End a reply and drop what is kept of it: it cannot be resumed any more.

    `cancelled` is true if it was being generated; its reader then gets an error with the code `cancelled`. A reply that
    is over and not kept is not found.
    """
    context, reply_id = request.app[CONTEXT], request.match_info["id"]
    context.check_loaded()
    try:
        was_running = await context.engine.cancel_reply(reply_id, request[PRINCIPAL].owner)
    except UnknownReplyError as error:
        raise reply_not_found(reply_id) from error
    return json_response(CancelledReply(id=reply_id, cancelled=was_running))


async def _resume(request: web.Request, position: StreamPosition) -> web.StreamResponse:
    context = request.app[CONTEXT]
    reply_id, principal = request.match_info["id"], request[PRINCIPAL]
    try:
        reply, generation = await generations.resume(
            context.engine,
            context.tokenizer,
            reply_id,
            principal.owner,
            context.formats,
            principal.limits,
            context.text_of,
        )
    except UnknownReplyError as error:
        raise reply_not_found(reply_id) from error
    request[GENERATION] = generation
    try:
        try:
            replies = stream_again(context, request.app[APIS], reply, generation)
        except UnknownReplyError as error:
            raise reply_not_found(reply_id) from error
        events = StreamEvents(generation, replies, has_ids=True, num_rewinds=len(reply.rewinds))
        return await _send_rest(request, reply, events, generation, position)
    finally:
        context.engine.leave(reply.submission.reply_id, reply.reader)


def _position_param(request: web.Request) -> str:
    """The parameter with the client's position."""
    return LAST_EVENT_ID if LAST_EVENT_ID in request.headers else FROM


def _position(request: web.Request) -> StreamPosition:
    """The client's position. Raises InputError."""
    param = _position_param(request)
    text = request.headers.get(LAST_EVENT_ID, request.query.get(FROM))
    try:
        return StreamPosition() if text is None else StreamPosition.parse(text)
    except ValueError:
        raise InputError(param, f"Invalid value for '{param}': it must be the id of an event.") from None


async def _send_rest(
    request: web.Request, reply: ResumedReply, events: StreamEvents, generation: Generation, position: StreamPosition
) -> web.StreamResponse:
    """Send what follows a position."""
    if (left := position.rewound_to(reply.rewinds)) is not None:
        raise stream_rewound(left)
    if position.end > reply.num_outputs or position.num_rewinds > len(reply.rewinds):
        param = _position_param(request)
        raise InputError(param, f"Invalid value for '{param}': no event of this stream has had that id.")
    rest = await _catch_up(events, generation, position)
    if generation.is_over and events.error is None and not rest and not events.tail():
        return web.Response(status=204)
    stream = EventStream(request, request.app[CONTEXT].config, events.framing.media_type)
    await stream.start()
    await stream.write(rest)
    return await send_events(stream, events, generation)


async def _catch_up(events: StreamEvents, generation: Generation, position: StreamPosition) -> bytes:
    """Skip to the position. Returns the rest of the events that contain it."""
    while generation.num_outputs < position.base:
        events.take(await generation.take(most=min(position.base - generation.num_outputs, MAX_OUTPUTS_TAKEN)))
    events.skip = position.skip
    # Joined as before, so that the events around the position are the same.
    if not position.size:
        return b""
    return events.take(await generation.take(least=position.size, most=position.size))


RESUMPTION_ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/stream/{id:.+}",
        resume_stream,
        media_types=(SERVER_SENT_EVENTS,),
        errors=(404, 409, 429, 503),
        parameters=(
            Parameter(LAST_EVENT_ID, "header", EventId, "id of the last event that the client has had"),
            Parameter(FROM, "query", EventId, "the same, for clients that cannot send the header"),
        ),
        can_be_empty=True,
    ),
    Endpoint("DELETE", "/v1/stream/{id:.+}", cancel_stream, reply=CancelledReply, errors=(404, 503)),
)
