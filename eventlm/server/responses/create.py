"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.server.answer import answer_once, answer_received, caller, receive
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.responses.background import run_in_background, show_begun
from eventlm.server.responses.history import earlier_items
from eventlm.server.responses.prompt import count_tokens, make_request, read_conversation
from eventlm.server.responses.protocol import InputTokensRequest, ResponsesRequest, decode_body
from eventlm.server.responses.replies import InputTokens
from eventlm.server.responses.stream import ResponseReplies
from eventlm.server.responses.turn import Turn
from eventlm.text.echo import Echo


class Responses(Api[ResponsesRequest]):
    """Responses. One that makes requests has a turn."""

    prefix = "resp_"
    path = "/v1/responses"
    numbers_events = True
    has_shadows = False

    def __init__(self, turn: Turn | None = None) -> None:
        self._turn = turn

    def decode(self, data: bytes) -> ResponsesRequest:
        return decode_body(data, ResponsesRequest)

    async def make_requests(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        assert self._turn is not None
        conversation = await read_conversation(context, body, caller, self._turn.earlier)
        self._turn.check()
        return Prepared([await make_request(context, body, conversation, body.model, received_ns, scheduling)])

    def reply_format(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return ResponseReplies(body, context.tokenizer, group, identity, context.formats)

    def runs_on(self, body: ResponsesRequest) -> bool:
        return bool(body.background)

    async def begin(self, context: ServerContext, body: ResponsesRequest, caller: Caller) -> Responses:
        return Responses(await Turn.begin(context, body, caller))

    async def begin_line(self, context: ServerContext, body: ResponsesRequest, caller: Caller) -> Responses:
        """Thousands of lines would take the place of responses that somebody reads: only those that ask are kept."""
        await super().begin_line(context, body, caller)
        if body.background:
            raise InputError("background", "Invalid value for 'background': a line of a batch has no need for it.")
        body.store = bool(body.store)
        return await self.begin(context, body, caller)

    async def ended(self, context: ServerContext, body: ResponsesRequest, owner: str, replies: ReplyFormat) -> None:
        assert self._turn is not None
        assert isinstance(replies, ResponseReplies)
        await self._turn.keep(replies.response)

    async def close(self) -> None:
        assert self._turn is not None
        await self._turn.end()


RESPONSES = Responses()


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer an input, a text or items, after what came before it."""
    received = await receive(request, RESPONSES)
    if not received.body.background:
        return await answer_received(request, RESPONSES, received)
    if received.body.store is False:
        raise InputError("background", "'background' needs 'store': the response is read after it has ended.")

    async def answer_first() -> web.StreamResponse:
        context = request.app[CONTEXT].of_model(received.body.model)
        turn = await Turn.begin(context, received.body, caller(request))
        return await run_in_background(request, Responses(turn), received, turn)

    return await answer_once(request, answer_first, partial(show_begun, request, RESPONSES))


async def count_input_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a response would have. What does not change the prompt has no effect."""
    context = request.app[CONTEXT]
    context.check_available()
    body = decode_body(await read_body(request), InputTokensRequest)
    context = context.check_model(body.model)
    model = body.model or context.engine.model_names[0]
    earlier = await earlier_items(context, body, caller(request))
    conversation = await read_conversation(context, body, caller(request), earlier)
    return json_response(InputTokens(input_tokens=await count_tokens(context, body, conversation, model)))
