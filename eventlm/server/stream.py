"""How a generation is answered: as one reply, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
import structlog
from aiohttp import web

from eventlm.errors import EventLMError
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.errors import ApiError, from_engine_error, from_finish_reason, internal_error
from eventlm.server.generation import ChoiceOutput, Generation
from eventlm.server.middleware import CURRENT_REQUEST_ID, STREAM_ERROR
from eventlm.server.protocol import GenerationRequest
from eventlm.server.replies import ApiFinishReason, Usage, api_finish_reason

_log = structlog.get_logger("eventlm.server")

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ReplyFormat(Protocol):
    """The shapes of one endpoint's replies."""

    #: Field that holds the prompt, for errors.
    prompt_param: str

    def opening(self, choice: int) -> Any | None:
        """The chunk that comes before a choice's text, if the endpoint has one."""
        ...

    def delta(self, choice: int, text: str) -> Any:
        """A chunk with text."""
        ...

    def finish(self, choice: int, reason: ApiFinishReason) -> Any:
        """A choice's last chunk, without text."""
        ...

    def usage(self, usage: Usage) -> Any:
        """The stream's last chunk, if the client asked for it."""
        ...

    def whole(self, texts: list[str], reasons: list[ApiFinishReason], usage: Usage) -> Any:
        """The reply that is not streamed."""
        ...


async def answer(
    request: web.Request, body: GenerationRequest, generation: Generation, replies: ReplyFormat
) -> web.StreamResponse:
    """Answer with what is generated. However this ends, the generation is released."""
    try:
        if not body.stream:
            return json_response(await _collect(generation, replies))
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await _stream(request, generation, replies, include_usage=include_usage)
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
    pieces: list[list[str]] = [[] for _ in range(generation.num_choices)]
    reasons: list[ApiFinishReason] = ["stop"] * generation.num_choices
    async for output in _outputs(generation, replies.prompt_param):
        pieces[output.choice].append(output.text)
        if output.finished is not None:
            reasons[output.choice] = api_finish_reason(output.finished.reason)
    return replies.whole(["".join(texts) for texts in pieces], reasons, generation.usage())


async def _stream(
    request: web.Request, generation: Generation, replies: ReplyFormat, *, include_usage: bool
) -> web.StreamResponse:
    async with aclosing(_outputs(generation, replies.prompt_param)) as outputs:
        # Until there is something to say an error is still an ordinary reply with its own status.
        first = await anext(outputs)
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        openings = [replies.opening(choice) for choice in range(generation.num_choices)]
        data = b"".join(_event(chunk) for chunk in openings if chunk is not None)
        await response.write(data + _output_events(first, replies))
        try:
            async for output in outputs:
                await response.write(_output_events(output, replies))
            tail = _event(replies.usage(generation.usage())) if include_usage else b""
        except ApiError as error:
            response[STREAM_ERROR] = error
            tail = _data(error.to_json())
        except ConnectionError:
            raise
        except Exception:
            _log.exception("a stream failed", request_id=CURRENT_REQUEST_ID.get(), path=request.path)
            response[STREAM_ERROR] = internal_error()
            tail = _data(response[STREAM_ERROR].to_json())
    await response.write(tail + _data(b"[DONE]"))
    await response.write_eof()
    return response


def _output_events(output: ChoiceOutput, replies: ReplyFormat) -> bytes:
    data = _event(replies.delta(output.choice, output.text)) if output.text else b""
    if output.finished is not None:
        data += _event(replies.finish(output.choice, api_finish_reason(output.finished.reason)))
    return data


def _event(chunk: Any) -> bytes:
    return _data(msgspec.json.encode(chunk))


def _data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
