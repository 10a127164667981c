"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from eventlm.engine.request import Request
from eventlm.errors import UnknownModelError
from eventlm.server.answer import answer, caller
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.responses.history import keep
from eventlm.server.responses.prompt import count_tokens, make_request, read_conversation
from eventlm.server.responses.protocol import InputTokensRequest, ResponsesRequest, decode_body
from eventlm.server.responses.replies import InputTokens
from eventlm.server.responses.stream import ResponseReplies
from eventlm.text.echo import Echo


class Responses(Api[ResponsesRequest]):
    """Responses."""

    prefix = "resp_"
    numbers_events = True

    def decode(self, data: bytes) -> ResponsesRequest:
        return decode_body(data, ResponsesRequest)

    async def prompts(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        conversation = await read_conversation(context, body, caller)
        return Prepared([await make_request(context, body, conversation, body.model, received_ns, scheduling)])

    def replies(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return ResponseReplies(body, context.tokenizer, group, identity, context.formats)

    async def ended(self, context: ServerContext, body: ResponsesRequest, owner: str, replies: ReplyFormat) -> None:
        assert isinstance(replies, ResponseReplies)
        await keep(context, body, owner, replies.response)


RESPONSES = Responses()


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer an input, a text or items, after what came before it."""
    return await answer(request, RESPONSES)


async def count_input_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a response would have. What does not change the prompt has no effect."""
    context = request.app[CONTEXT]
    context.check_available()
    body = decode_body(await read_body(request), InputTokensRequest)
    model = body.model or context.engine.model_names[0]
    if model not in context.engine.model_names:
        raise UnknownModelError(model)
    conversation = await read_conversation(context, body, caller(request))
    return json_response(InputTokens(input_tokens=await count_tokens(context, body, conversation, model)))
