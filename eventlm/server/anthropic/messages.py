"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from eventlm.engine.request import Request
from eventlm.server.answer import answer
from eventlm.server.anthropic.errors import MESSAGES_PATH
from eventlm.server.anthropic.message_replies import MessageReplies
from eventlm.server.anthropic.protocol import (
    IGNORED_IN_MESSAGES,
    UNSUPPORTED_IN_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from eventlm.server.anthropic.replies import MessageEvent, MessageReply, TokenCount
from eventlm.server.anthropic.translation import chat_request, own_errors
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.refusals import RefusedPath
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.translation import limited
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo


class Messages(Api[MessagesRequest]):
    """Anthropic's conversations."""

    prefix = "msg_"

    def decode(self, data: bytes) -> MessagesRequest:
        body = decode_request(data, MessagesRequest, UNSUPPORTED_IN_MESSAGES)
        if body.service_tier == "standard_only":
            # Anthropic's word for the tier of those that have none.
            body.service_tier = "default"
        return body

    async def make_requests(
        self,
        context: ServerContext,
        body: MessagesRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        chat = chat_request(body, context.tokenizer.chat_template, context.formats, forwards=context.forwards)
        with own_errors():
            request = await context.requests.chat(chat, received_ns, **scheduling)
        return Prepared([limited(request, body.max_tokens)])

    def reply_format(
        self,
        context: ServerContext,
        body: MessagesRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return MessageReplies(body, context.tokenizer, group, identity, context.formats)


MESSAGES = Messages()


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, in Anthropic's format."""
    return await answer(request, MESSAGES)


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a conversation has, in Anthropic's format."""
    context = request.app[CONTEXT]
    context.check_available()
    body = decode_request(await read_body(request), CountTokensRequest, UNSUPPORTED_IN_MESSAGES)
    context = context.check_model(body.model)
    chat = chat_request(body, context.tokenizer.chat_template, context.formats, forwards=context.forwards)
    with own_errors():
        token_ids = await context.requests.encode_messages(chat)
    return json_response(TokenCount(len(token_ids)))


MESSAGES_REFUSED = (
    RefusedPath(f"{MESSAGES_PATH}/batches(/.*)?", "batches have OpenAI's form here; use /v1/files and /v1/batches"),
    RefusedPath("/v1/complete", f"text completions are older than conversations; use {MESSAGES_PATH}"),
)
MESSAGES_ENDPOINTS = (
    Endpoint(
        "POST",
        MESSAGES_PATH,
        messages,
        MessagesRequest,
        MessageReply,
        chunk=MessageEvent,
        generates=True,
        ignored=IGNORED_IN_MESSAGES,
        refused=UNSUPPORTED_IN_MESSAGES,
    ),
    Endpoint(
        "POST",
        f"{MESSAGES_PATH}/count_tokens",
        count_tokens,
        CountTokensRequest,
        TokenCount,
        errors=(503,),
        only=("model", "messages", "system", "tools", "tool_choice", "thinking", "chat_template_kwargs"),
        refused=UNSUPPORTED_IN_MESSAGES,
    ),
)
