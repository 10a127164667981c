"""Answers to generating requests: as one JSON object, or as a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, NamedTuple

import structlog
from aiohttp import web

from eventlm.errors import EventLMError
from eventlm.server.api import Api, BodyT, Caller, decode_body
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response, read_body
from eventlm.server.errors import TAKEN_OVER, ApiError, api_error, internal_error
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import ANSWERED_BY, GENERATION, REQUEST_ID, STREAM_ERROR, take_request_id
from eventlm.server.model_rules import submit
from eventlm.server.request_log import request_fields
from eventlm.server.scheduling import CLASS_HEADER, SESSION_HEADER
from eventlm.server.stream_events import StreamEvents
from eventlm.telemetry.traceparent import parse_traceparent
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
    return Received(body, data, received_ns)


async def answer_received(request: web.Request, api: Api[BodyT], received: Received[BodyT]) -> web.StreamResponse:
    """Answer a body that was read, and close the API: now, or when nobody reads the reply any more."""
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(api.close)
        return await _answer(request, api, received, closing)


async def _answer(
    request: web.Request, api: Api[BodyT], received: Received[BodyT], closing: contextlib.AsyncExitStack
) -> web.StreamResponse:
    body, data, received_ns = received
    server = request.app[CONTEXT]
    context, body, exchange, generation, answered_by = await submit(
        server, api, body, data, caller(request), received_ns
    )
    request[GENERATION] = generation
    request[ANSWERED_BY] = answered_by
    ended = partial(api.ended, context, body, exchange.submission.owner, exchange.reply_format)
    if exchange.stream is None:
        try:
            reply = await exchange.whole(generation)
            await ended()
            return json_response(reply)
        finally:
            context.release(generation)
    stream = EventStream(request, context.config, exchange.stream.framing.media_type)
    is_resumable, reply_id = exchange.submission.is_resumable, exchange.submission.reply_id
    events = StreamEvents(generation, exchange.stream, has_ids=is_resumable)
    try:
        return await send_events(stream, events, generation, ended)
    finally:
        if is_resumable:
            context.engine.leave(reply_id, 0)
        # A client that has not received the id cannot resume.
        if is_resumable and stream.is_started and events.error is None and not generation.is_over:
            reading = _read_on(events, generation, ended, closing.pop_all())
            context.run_on(generation, reading, request_fields(request), received_ns)
        else:
            context.release(generation)


async def _read_on(
    events: StreamEvents,
    generation: Generation,
    ended: Callable[[], Awaitable[None]],
    closing: contextlib.AsyncExitStack,
) -> ApiError | None:
    async with closing:
        return await read_events(events, generation, ended)


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
