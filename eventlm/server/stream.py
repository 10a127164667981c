"""Replies to a generation: as one JSON object, or as server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from aiohttp import web

from eventlm.engine.request import Request, Submission
from eventlm.errors import EventLMError
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import BODY, CONTEXT, json_response
from eventlm.server.errors import api_error, internal_error
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import GENERATION, REQUEST_ID, STREAM_ERROR
from eventlm.server.stream_events import ReplyFormat, StreamEvents
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput, join_outputs
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import GenerationRequest

_log = structlog.get_logger("eventlm.server")


class EdgeState(msgspec.Struct, frozen=True, array_like=True):
    """The state from which a reply can be made again, with the request's body."""

    created: int
    body: bytes
    service_tier: str | None
    echoes: list[Echo]


async def answer(
    request: web.Request, body: GenerationRequest, group: list[Request], replies: ReplyFormat
) -> web.StreamResponse:
    """Submit a group and answer with what is generated."""
    context = request.app[CONTEXT]
    submission = _submission(request, body, replies)
    generation = await context.submit(group, submission, prompt_param=replies.prompt_param)
    request[GENERATION] = generation
    if not body.stream:
        try:
            whole = await _collect(generation, replies)
            return json_response(with_timings(whole, generation.rows) if body.wants_timings else whole)
        finally:
            context.release(generation)
    stream = EventStream(request, context.config)
    try:
        events = StreamEvents(generation, replies, body, has_ids=submission.is_resumable)
        return await send_events(stream, events, generation)
    finally:
        if submission.is_resumable:
            context.engine.leave(submission.reply_id, 0)
        # A client that has not received the id cannot resume.
        if submission.is_resumable and stream.is_started:
            context.detach(generation)
        else:
            context.release(generation)


def _submission(request: web.Request, body: GenerationRequest, replies: ReplyFormat) -> Submission:
    is_resumable = bool(body.stream) and request.app[CONTEXT].config.resume_seconds > 0
    reply_id, created = replies.identity
    principal, request_id = request[PRINCIPAL], request[REQUEST_ID]
    state = EdgeState(created, request[BODY], body.service_tier, list(replies.echoes))
    return Submission(
        reply_id=reply_id,
        owner=principal.owner,
        edge_state=msgspec.msgpack.encode(state) if is_resumable else b"",
        is_resumable=is_resumable,
        limits=principal.limits,
        request_id=request_id,
    )


async def _collect(generation: Generation, replies: ReplyFormat) -> Any:
    pieces: list[list[ChoiceOutput]] = [[] for _ in range(generation.num_choices)]
    while not generation.is_over:
        for output in await generation.take():
            if (error := output.error) is not None:
                raise error
            pieces[output.choice].append(output)
    return await replies.whole([join_outputs(outputs) for outputs in pieces], generation)


async def send_events(stream: EventStream, events: StreamEvents, generation: Generation) -> web.StreamResponse:
    """Send a generation's events up to its end or an error."""
    reads_on = True
    try:
        while events.error is None and not generation.is_over:
            data = events.take(await generation.take())
            if data:
                # Until the first event, an error is still a reply with its own status.
                if not stream.is_started:
                    await stream.start()
                stream.send(data)
                if stream.is_full:
                    await generation.read_until(stream.drain())
        error = events.error
        tail = events.tail() if error is None else b""
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
    if error is not None:
        if not stream.is_started:
            raise error
        stream.response[STREAM_ERROR] = error
        tail = events.failure(error)
    end = stream.end(tail)
    # Another reader may need the text after an error.
    await (generation.read_until(end) if reads_on else end)
    return stream.response
