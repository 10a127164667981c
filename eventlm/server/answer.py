"""Answers to generating requests: as one JSON object, or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, NamedTuple

import structlog
from aiohttp import web

from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import IdempotencyKey, KeyTakenError, ResumedReply, UnknownReplyError
from eventlm.errors import EventLMError
from eventlm.server.api import Api, BodyT, Caller, Exchange, decode_body, edge_state
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.server.errors import IDEMPOTENCY_HEADER, TAKEN_OVER, ApiError, api_error, internal_error, unavailable
from eventlm.server.http.event_stream import EventStream
from eventlm.server.idempotency import IDEMPOTENCY_KEY, idempotency_key
from eventlm.server.middleware import ANSWERED_BY, GENERATION, REQUEST_ID, STREAM_ERROR, take_request_id
from eventlm.server.model_rules import submit
from eventlm.server.request_log import request_fields
from eventlm.server.scheduling import CLASS_HEADER, SESSION_HEADER
from eventlm.server.stream_events import StreamEvents
from eventlm.telemetry.traceparent import parse_traceparent
from eventlm.text import generation as generations
from eventlm.text.generation import Generation
from eventlm.text.output_queue import TakenOverError

_log = structlog.get_logger("eventlm.server")


class Received(NamedTuple, Generic[BodyT]):
    """A body, its bytes, and when its reception began, by the engine's clock."""

    body: BodyT
    data: bytes
    received_ns: int


async def answer(request: web.Request, api: Api[BodyT]) -> web.StreamResponse:
    """Answer a request through an API."""
    received = await receive(request, api)
    reply = api.without_generation(request.app[CONTEXT].of_model(received.body.model), received.body)
    return await answer_received(request, api, received) if reply is None else json_response(reply)


async def receive(request: web.Request, api: Api[BodyT]) -> Received[BodyT]:
    """Read a request's body. Raises InputError or ApiError."""
    received_ns = request.app[CONTEXT].engine.now_ns()
    data = await read_body(request, any_type=api.takes_any_type)
    body = decode_body(request.app[CONTEXT], api, data)
    take_request_id(request, body.request_id)
    key = idempotency_key(request, data)
    if key is not None:
        request[IDEMPOTENCY_KEY] = key
    return Received(body, data, received_ns)


async def answer_received(request: web.Request, api: Api[BodyT], received: Received[BodyT]) -> web.StreamResponse:
    """Answer a body that was read."""

    async def answer_alone() -> web.StreamResponse:
        async with contextlib.AsyncExitStack() as closing:
            return await _answer(request, api, received, closing)

    has_key = IDEMPOTENCY_KEY in request
    first = partial(_answer_first, request, api, received) if has_key else answer_alone
    return await answer_once(request, first, partial(_send_again, request, api))


async def answer_once(
    request: web.Request,
    answer_first: Callable[[], Awaitable[web.StreamResponse]],
    join: Callable[[ResumedReply, Generation], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Answer a request whose body was read: by `join` if it has a key that a reply has, else by `answer_first`, which
    may raise KeyTakenError.
    """
    server, principal, key = request.app[CONTEXT], request[PRINCIPAL], request.get(IDEMPOTENCY_KEY)
    if key is None:
        return await answer_first()
    while True:
        try:
            reply, generation = await _resume(server, key, principal.owner, principal.limits)
        except UnknownReplyError:
            with contextlib.suppress(KeyTakenError):
                return await answer_first()
            continue
        request[GENERATION] = generation
        try:
            return await join(reply, generation)
        finally:
            server.engine.leave(reply.submission.reply_id, reply.reader)


async def _resume(
    server: ServerContext, name: str | IdempotencyKey, owner: str, limits: RateLimits = NO_LIMITS
) -> tuple[ResumedReply, Generation]:
    return await generations.resume(
        server.engine, server.tokenizer, name, owner, server.formats, limits, server.text_of
    )


async def _send_again(
    request: web.Request,
    api: Api[Any],
    reply: ResumedReply,
    generation: Generation,
    ended: Callable[[], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Send a reply from its beginning, whole or as a stream, as its body asked."""
    context = request.app[CONTEXT]
    exchange = Exchange.again(context, api, reply, edge_state(reply))
    exchange.read(generation)
    scheduling = reply.group[0].scheduling
    request[ANSWERED_BY] = scheduling.model if scheduling.route else ""
    if exchange.stream is None:
        return json_response(await exchange.whole(generation))
    stream = EventStream(request, context.config, exchange.stream.framing.media_type)
    events = StreamEvents(generation, exchange.stream, has_ids=exchange.has_ids)
    return await send_events(stream, events, generation, ended)


class _Reading(NamedTuple):
    """A reply that is read to its end without a client. end: the reply if it is whole, or the error that ended the
    stream.
    """

    exchange: Exchange
    generation: Generation
    end: asyncio.Future[Any]
    answered_by: str


async def _answer_first(request: web.Request, api: Api[BodyT], received: Received[BodyT]) -> web.StreamResponse:
    """Answer the first request with its key. Its reply does not depend on its client, since others may join."""
    server = request.app[CONTEXT]

    def leave(reading: _Reading) -> None:
        server.engine.leave(reading.exchange.submission.reply_id, 0)

    reading = await generations.attach(_begin(request, api, received), lambda begun: begun, leave)
    exchange, generation, end, request[ANSWERED_BY] = reading
    submission = exchange.submission
    structlog.contextvars.bind_contextvars(seq=generation.handles[0].request)
    request[GENERATION] = generation
    try:
        if exchange.stream is None:
            return json_response(await asyncio.shield(end))
        try:
            reply, again = await _resume(server, submission.reply_id, submission.owner)
        except UnknownReplyError as error:
            raise unavailable(f"There was no room to keep the reply, as an {IDEMPOTENCY_HEADER} demands.") from error
        again.handles[0].rate_limits = generation.handles[0].rate_limits
        request[GENERATION] = again
        try:
            return await _send_again(request, api, reply, again, partial(_until_read, end))
        finally:
            server.engine.leave(submission.reply_id, reply.reader)
    finally:
        leave(reading)


async def _begin(request: web.Request, api: Api[BodyT], received: Received[BodyT]) -> _Reading:
    """Submit a body, and read its reply in a task of its own."""
    body, data, received_ns = received
    async with contextlib.AsyncExitStack() as closing:
        api = await _begin_api(request, api, body, closing)
        context, body, exchange, generation, answered_by = await submit(
            request.app[CONTEXT], api, body, data, caller(request), received_ns
        )
        ended = partial(api.ended, context, body, exchange.submission.owner, exchange.reply_format)
        if exchange.stream is None:
            making: Coroutine[Any, Any, Any] = _make(exchange, generation, ended)
        else:
            making = read_events(StreamEvents(generation, exchange.stream, has_ids=False), generation, ended)
        end = asyncio.ensure_future(making)
        context.run_on(generation, _read_on(end, closing.pop_all()), request_fields(request), received_ns)
        return _Reading(exchange, generation, end, answered_by)


async def _make(exchange: Exchange, generation: Generation, ended: Callable[[], Awaitable[None]]) -> Any:
    """The reply without streaming."""
    reply = await exchange.whole(generation)
    await ended()
    return reply


async def _until_read(end: asyncio.Future[ApiError | None]) -> None:
    """Wait until a stream was read to its end. Raises what ended it early."""
    error = await asyncio.shield(end)
    if error is not None:
        raise error


async def _begin_api(
    request: web.Request, api: Api[BodyT], body: BodyT, closing: contextlib.AsyncExitStack
) -> Api[BodyT]:
    """The API for one body, which is closed with `closing`."""
    begun = await api.begin(request.app[CONTEXT].of_model(body.model), body, caller(request))
    closing.push_async_callback(begun.close)
    return begun


async def _answer(
    request: web.Request, api: Api[BodyT], received: Received[BodyT], closing: contextlib.AsyncExitStack
) -> web.StreamResponse:
    """Answer a body without a key. What it needs is closed now, or when nobody reads the reply any more."""
    body, data, received_ns = received
    api = await _begin_api(request, api, body, closing)
    server = request.app[CONTEXT]
    context, body, exchange, generation, answered_by = await submit(
        server, api, body, data, caller(request), received_ns
    )
    request[GENERATION] = generation
    request[ANSWERED_BY] = answered_by
    ended = partial(api.ended, context, body, exchange.submission.owner, exchange.reply_format)
    if exchange.stream is None:
        try:
            return json_response(await _make(exchange, generation, ended))
        finally:
            context.release(generation)
    stream = EventStream(request, context.config, exchange.stream.framing.media_type)
    is_resumable, reply_id = exchange.submission.is_resumable, exchange.submission.reply_id
    events = StreamEvents(generation, exchange.stream, has_ids=exchange.has_ids)
    try:
        return await send_events(stream, events, generation, ended)
    finally:
        if is_resumable:
            context.engine.leave(reply_id, 0)
        # A client that has not received the id cannot resume.
        if is_resumable and stream.is_started and events.error is None and not generation.is_over:
            reading = _read_on(read_events(events, generation, ended), closing.pop_all())
            context.run_on(generation, reading, request_fields(request), received_ns)
        else:
            context.release(generation)


async def _read_on(reading: Awaitable[Any], closing: contextlib.AsyncExitStack) -> ApiError | None:
    """Read a reply to its end without a client. Returns the error that ended it."""
    async with closing:
        end = await reading
    return end if isinstance(end, ApiError) else None


def caller(request: web.Request) -> Caller:
    """Who sent a request."""
    headers = request.headers
    traceparent = headers.get("traceparent", "")
    return Caller(
        request[PRINCIPAL],
        request[REQUEST_ID],
        headers.get(CLASS_HEADER, ""),
        traceparent if traceparent and parse_traceparent(traceparent) else "",
        headers.get(SESSION_HEADER, ""),
        request.get(IDEMPOTENCY_KEY),
    )


async def send_events(
    stream: EventStream,
    events: StreamEvents,
    generation: Generation,
    ended: Callable[[], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Send a generation's events up to its end or an error.

    `ended` is awaited before the last ones are sent. What it raises ends the stream with an error.
    """
    reads_on = True
    open_streams = stream.request.app[CONTEXT].open_streams
    open_streams[stream] = None
    try:
        while events.error is None and not generation.is_over:
            data = events.take(await generation.take())
            if data:
                # Until the first event, an error is still a reply with its own status.
                if stream.is_started:
                    stream.send(data)
                else:
                    await stream.start(data)
                if stream.is_full:
                    await generation.read_until(stream.drain())
        error = events.error
        if error is None:
            tail = events.tail()
            if ended is not None:
                await ended()
    except EventLMError as failure:
        error = api_error(failure)
    except ConnectionError:
        raise
    except Exception:
        if not stream.is_started:
            raise
        _log.exception("a stream failed")
        # Its text cannot be read any further.
        error, reads_on = internal_error(), False
    finally:
        del open_streams[stream]
    if not stream.is_started:
        if error is not None:
            raise error
        # An API may have no events for a text that is empty.
        await stream.start()
    if error is not None:
        stream.response[STREAM_ERROR] = error
        tail = events.failure(error)
        if ended is not None and error.envelope.error.code != TAKEN_OVER:
            with contextlib.suppress(EventLMError):
                await ended()
    end = stream.end(tail)
    # Another reader may need the text after an error.
    await (generation.read_until(end) if reads_on else end)
    return stream.response


async def read_events(
    events: StreamEvents, generation: Generation, ended: Callable[[], Awaitable[None]]
) -> ApiError | None:
    """Go on without a client, as `send_events` would: the texts have ends that the engine must know, and so has the
    reply. Returns the error that ended it.
    """
    try:
        while events.error is None and not generation.is_over:
            with contextlib.suppress(TakenOverError):
                events.take(await generation.take())
        error = events.error
    except EventLMError as failure:
        error = api_error(failure)
    if error is None:
        events.tail()
    else:
        events.failure(error)
    await ended()
    return error
