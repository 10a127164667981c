"""How a generation is answered: as one reply, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
import structlog
from aiohttp import web

from eventlm.control.request import EngineRequest, Submission
from eventlm.errors import EventLMError
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.errors import ApiError, from_engine_error, from_finish_reason, internal_error
from eventlm.server.generation import ChoiceOutput, Generation, join_outputs
from eventlm.server.middleware import GENERATION, STREAM_ERROR
from eventlm.server.principal import PRINCIPAL
from eventlm.server.protocol import GenerationRequest, StreamOptions
from eventlm.server.replies import Usage
from eventlm.server.scheduling import schedule

_log = structlog.get_logger("eventlm.server")

#: Usage so far of a choice.
UsageOf = Callable[[int], Usage]

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ReplyFormat(Protocol):
    """The shapes of one endpoint's replies."""

    #: Field that holds the prompt, for errors.
    prompt_param: str
    #: The reply's public id.
    reply_id: str

    def opening(self, choice: int) -> Any | None:
        """The chunk that comes before a choice's text, if the endpoint has one."""
        ...

    def delta(self, output: ChoiceOutput) -> Any | None:
        """A chunk with what an output says, if it says anything: text may be held back."""
        ...

    def finish(self, output: ChoiceOutput) -> Any:
        """A choice's last chunk, without text."""
        ...

    def usage(self, usage: Usage) -> Any:
        """The stream's last chunk, if the client asked for it."""
        ...

    def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        """The reply that is not streamed, of all choices in their order."""
        ...


async def answer(
    request: web.Request, body: GenerationRequest, group: list[EngineRequest], replies: ReplyFormat
) -> web.StreamResponse:
    """Submit a group and answer with what is generated."""
    group = schedule(request, body, group)
    submission = Submission(reply_id=replies.reply_id, owner=request[PRINCIPAL].owner)
    generation = await request.app[CONTEXT].submit(group, submission, prompt_param=replies.prompt_param)
    request[GENERATION] = generation
    try:
        if not body.stream:
            return json_response(await _collect(generation, replies))
        return await _stream(request, generation, replies, body.stream_options or StreamOptions())
    finally:
        request.app[CONTEXT].release(generation)


async def _outputs(generation: Generation, prompt_param: str) -> AsyncGenerator[ChoiceOutput]:
    """The generation's outputs; an end that is an error raises ApiError."""
    try:
        async with aclosing(generation.outputs()) as outputs:
            async for output in outputs:
                error = from_finish_reason(output.finished.reason) if output.finished else None
                if error is not None:
                    raise error
                yield output
    except EventLMError as error:
        raise from_engine_error(error, prompt_param=prompt_param) from error


async def _collect(generation: Generation, replies: ReplyFormat) -> Any:
    pieces: list[list[ChoiceOutput]] = [[] for _ in range(generation.num_choices)]
    async for output in _outputs(generation, replies.prompt_param):
        pieces[output.choice].append(output)
    return replies.whole([join_outputs(outputs) for outputs in pieces], generation)


async def _stream(
    request: web.Request, generation: Generation, replies: ReplyFormat, options: StreamOptions
) -> web.StreamResponse:
    # As vLLM does: without include_usage there is none in any chunk.
    usage_of = generation.usage_of if options.include_usage and options.continuous_usage_stats else None
    openings = [(replies.opening(choice), choice) for choice in range(generation.num_choices)]
    opening = b"".join(_event(chunk, usage_of, choice) for chunk, choice in openings if chunk is not None)
    async with aclosing(_output_events(generation, replies, usage_of)) as events:
        # Until there is something to say an error is still an ordinary reply with its own status.
        first = await anext(events)
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        await response.write(opening + first)
        try:
            async for event in events:
                await response.write(event)
            tail = _event(replies.usage(generation.usage())) if options.include_usage else b""
        except ApiError as error:
            response[STREAM_ERROR] = error
            tail = _data(error.to_json())
        except ConnectionError:
            raise
        except Exception:
            _log.exception("a stream failed", path=request.path)
            response[STREAM_ERROR] = internal_error()
            tail = _data(response[STREAM_ERROR].to_json())
    await response.write(tail + _data(b"[DONE]"))
    await response.write_eof()
    return response


async def _output_events(
    generation: Generation, replies: ReplyFormat, usage_of: UsageOf | None
) -> AsyncGenerator[bytes]:
    """What is sent of each output that says something."""
    async with aclosing(_outputs(generation, replies.prompt_param)) as outputs:
        async for output in outputs:
            chunk = replies.delta(output)
            data = b"" if chunk is None else _event(chunk, usage_of, output.choice)
            if output.finished is not None:
                data += _event(replies.finish(output), usage_of, output.choice)
            if data:
                yield data


def _event(chunk: Any, usage_of: UsageOf | None = None, choice: int = 0) -> bytes:
    if usage_of is not None:
        chunk = msgspec.structs.replace(chunk, usage=usage_of(choice))
    return _data(msgspec.json.encode(chunk))


def _data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
