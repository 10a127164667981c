"""`/v1/stream/{id}`: a client that lost the connection of its stream goes on with it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from eventlm.engine.rate_limits import RateLimitError
from eventlm.engine.request import EngineUnavailableError, ResumedReply, UnknownReplyError
from eventlm.errors import EventLMError, InputError
from eventlm.formatting import sentence
from eventlm.server.auth.principal import PRINCIPAL
from eventlm.server.context import CONTEXT, ServerContext, json_response
from eventlm.server.endpoints.chat import CHAT_PREFIX, ChatReplies
from eventlm.server.endpoints.completions import CompletionReplies
from eventlm.server.errors import from_engine_error, reply_not_found, unavailable
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import GENERATION
from eventlm.server.responses import CancelledReply, ReplyIdentity
from eventlm.server.stream import EdgeState, send_events, stream_error
from eventlm.server.stream_events import EVENT_ID_PATTERN, ReplyFormat, StreamEvents, StreamPosition
from eventlm.text import generation as generations
from eventlm.text.decoding import decode_request
from eventlm.text.generation import MAX_OUTPUTS_TAKEN, Generation
from eventlm.text.protocol import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)

LAST_EVENT_ID = "Last-Event-ID"
FROM = "from"
EventId = Annotated[str, Meta(pattern=EVENT_ID_PATTERN)]


async def resume_stream(request: web.Request) -> web.StreamResponse:
    """Go on with a stream whose connection was lost. To the key's limits it is one more request, without tokens.

    `Last-Event-ID`, or else `from`, is the id of the last event that the client has had; without either the stream
    comes from its start. Its text joins to that of the unbroken stream. 204 if the client has had all of it. Whoever
    else reads the stream at the moment is told that it is continued here.
    """
    if request.method == "HEAD":
        # It would take the stream from its reader and throw it away.
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "DELETE"])
    context = request.app[CONTEXT]
    position = _position(request)
    context.enter()
    try:
        return await _resume(request, position)
    finally:
        context.leave()


async def cancel_stream(request: web.Request) -> web.Response:
    """End a reply, and keep nothing of it: it cannot be resumed any more.

    `cancelled` says whether it was being generated; whoever reads it then is told so by an error with the code
    `cancelled`. A reply that is over and of which nothing is kept is not found.
    """
    reply_id = request.match_info["id"]
    try:
        was_running = await request.app[CONTEXT].engine.cancel_reply(reply_id, request[PRINCIPAL].owner)
    except UnknownReplyError as error:
        raise reply_not_found(reply_id) from error
    return json_response(CancelledReply(id=reply_id, cancelled=was_running))


async def _resume(request: web.Request, position: StreamPosition) -> web.StreamResponse:
    context = request.app[CONTEXT]
    reply_id, principal = request.match_info["id"], request[PRINCIPAL]
    try:
        reply, generation = await generations.resume(
            context.engine, context.tokenizer, reply_id, principal.owner, context.formats, principal.limits
        )
    except UnknownReplyError as error:
        raise reply_not_found(reply_id) from error
    except RateLimitError as error:
        raise from_engine_error(error, prompt_param="id") from error
    except EngineUnavailableError as error:
        raise unavailable(sentence(str(error))) from error
    request[GENERATION] = generation
    try:
        return await _send_rest(request, reply, generation, position)
    finally:
        context.engine.leave(reply.submission.reply_id, reply.reader)


def _position_param(request: web.Request) -> str:
    """Where the request says where the client stands, if it does."""
    return LAST_EVENT_ID if LAST_EVENT_ID in request.headers else FROM


def _position(request: web.Request) -> StreamPosition:
    """Where the client stands. Raises ApiError."""
    param = _position_param(request)
    text = request.headers.get(LAST_EVENT_ID, request.query.get(FROM))
    try:
        return StreamPosition() if text is None else StreamPosition.parse(text)
    except ValueError:
        raise InputError(param, f"Invalid value for '{param}': it must be the id of an event.") from None


async def _send_rest(
    request: web.Request, reply: ResumedReply, generation: Generation, position: StreamPosition
) -> web.StreamResponse:
    """All that comes behind a position."""
    if position.end > reply.num_outputs:
        param = _position_param(request)
        raise InputError(param, f"Invalid value for '{param}': no event of this stream has had that id.")
    context = request.app[CONTEXT]
    body, replies = _replies(context, reply)
    events = StreamEvents(generation, replies, body, has_ids=True)
    try:
        rest = await _catch_up(events, generation, position)
    except EventLMError as failure:
        raise stream_error(failure, replies.prompt_param) from failure
    if generation.is_over and position.skip >= events.num_tail_events and not position.size:
        return web.Response(status=204)
    stream = EventStream(request, context.config)
    await stream.start()
    await stream.write(rest)
    return await send_events(stream, events, generation, replies.prompt_param)


async def _catch_up(events: StreamEvents, generation: Generation, position: StreamPosition) -> bytes:
    """Go to the position; what is left of the events among which it is. Raises what the generation raises."""
    while generation.num_outputs < position.base:
        events.take(await generation.take(most=min(position.base - generation.num_outputs, MAX_OUTPUTS_TAKEN)))
    events.skip = position.skip
    # Joined as they were, so that the events among which the client stands come out the same.
    if not position.size:
        return b""
    return events.take(await generation.take(least=position.size, most=position.size))


def _replies(context: ServerContext, reply: ResumedReply) -> tuple[GenerationRequest, ReplyFormat]:
    """The request, and what makes the reply's chunks as it did the first time."""
    state = msgspec.msgpack.decode(reply.submission.edge_state, type=EdgeState)
    identity = ReplyIdentity(reply.submission.reply_id, state.created)
    if identity.reply_id.startswith(CHAT_PREFIX):
        chat = decode_request(state.body, ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
        chat.service_tier = state.service_tier
        return chat, ChatReplies(chat, context.tokenizer, reply.group, identity, context.formats)
    body = decode_request(state.body, CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
    body.service_tier = state.service_tier
    return body, CompletionReplies(body, context.tokenizer, reply.group, identity, state.echoes)
