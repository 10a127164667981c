"""`POST /api/chat`."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.model_card import rfc3339
from eventlm.server.ollama.lines import OllamaReplies, OllamaReply, OllamaToolCall
from eventlm.server.ollama.options import (
    NATIVE_NAMES,
    OllamaFields,
    response_format,
    served_name,
    thinking_fields,
)
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.translation import limited, native_fields, within_limits
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.protocol import CalledFunction, ChatCompletionRequest, ChatMessage, MessageToolCall


class OllamaMessage(Struct, kw_only=True):
    """A message of a conversation. The result of a tool names it, or the id of its call."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """Body of `POST /api/chat`. Without messages the reply says that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaReplyMessage(Struct, frozen=True, kw_only=True):
    """The assistant's message, or a part of it."""

    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: Sequence[OllamaToolCall] | UnsetType = UNSET


class OllamaChatReply(OllamaReply, frozen=True, kw_only=True):
    """Reply of `/api/chat`, and a line of its stream."""

    message: OllamaReplyMessage


class OllamaChatReplies(OllamaReplies):
    """Replies with a message."""

    prompt_param = "messages"

    def line(
        self, *, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> Any:
        message = OllamaReplyMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return OllamaChatReply(message=message, **self.fixed_fields(), **fields)


class OllamaChat(Api[OllamaChatRequest]):
    """Conversations in Ollama's shapes."""

    prefix = "ollama-chat-"
    takes_any_type = True

    def decode(self, data: bytes) -> OllamaChatRequest:
        return decode_request(data, OllamaChatRequest, {})

    def without_generation(self, context: ServerContext, body: OllamaChatRequest) -> OllamaChatReply | None:
        served_name(context, body.model)
        if body.messages:
            return None
        return OllamaChatReply(
            model=body.model,
            created_at=rfc3339(context.system.clock.unix_s()),
            message=OllamaReplyMessage(content=""),
            done=True,
            done_reason=body.load_reason,
        )

    async def make_requests(
        self,
        context: ServerContext,
        body: OllamaChatRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        messages, tools = chat_messages(body.messages or []), body.tools
        # The type has one value only, and some clients leave it out.
        tools = [{"type": "function", **tool} for tool in tools] if tools else None
        request = await chat_request(context, body, messages, tools, received_ns, scheduling)
        return Prepared(within_limits([request], body.used_options.most_tokens, caller.principal.limits))

    def reply_format(
        self,
        context: ServerContext,
        body: OllamaChatRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return OllamaChatReplies(body, context.tokenizer, group, identity, context.formats)

    def wants_stream(self, body: OllamaChatRequest) -> bool:
        return body.stream is not False


async def chat_request(
    context: ServerContext,
    body: OllamaFields,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    received_ns: int,
    scheduling: Mapping[str, Any],
) -> Request:
    """The request for a conversation with the options of a body. Raises InputError."""
    options = body.used_options
    with native_fields(NATIVE_NAMES):
        chat = ChatCompletionRequest(
            model=served_name(context, body.model),
            messages=messages,
            tools=tools,
            response_format=response_format(body.format),
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs if body.logprobs else None,
            **options.fields(),
            **thinking_fields(context, body),
        )
        return limited(await context.requests.chat(chat, received_ns, **scheduling), options.most_tokens)


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages as `/v1/chat/completions` takes them. Calls without an id get one, and results that of their call.

    Raises InputError.
    """
    found: list[ChatMessage] = []
    open_calls = _OpenCalls()
    for index, message in enumerate(messages):
        refuse_images(message.images, f"messages[{index}].images")
        calls = [
            MessageToolCall(
                id=call.id or f"call_{index}_{number}",
                function=CalledFunction(call.function.name, msgspec.json.encode(call.function.arguments).decode()),
            )
            for number, call in enumerate(message.tool_calls or [])
        ]
        for call in calls:
            open_calls.add(call.id, call.function.name)
        role, call_id = message.role.lower(), message.tool_call_id
        if role == "tool":
            call_id = call_id or open_calls.first(message.tool_name) or f"call_{message.tool_name or 'unknown'}"
            open_calls.remove(call_id)
        found.append(
            ChatMessage(
                role=role,
                content=message.content or "",
                name=message.tool_name,
                tool_calls=calls or None,
                tool_call_id=call_id,
                reasoning_content=message.thinking or None,
            )
        )
    return found


def refuse_images(images: list[str] | None, param: str) -> None:
    """Raise InputError if there are any."""
    if images:
        raise InputError(param, f"'{param}' is not supported: models here take text only; leave it out.")


class _OpenCalls:
    """The calls without a result so far, in their order. Each method takes the same time, however many there are."""

    def __init__(self) -> None:
        #: Names of tools by the ids of calls, and ids by the names of tools. These dicts find their first key at once.
        self._names: OrderedDict[str, str] = OrderedDict()
        self._ids: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def add(self, call_id: str, name: str) -> None:
        """Add a call, or call again by an id that was open."""
        self.remove(call_id)
        self._names[call_id] = name
        self._ids[name][call_id] = None

    def remove(self, call_id: str) -> None:
        """Remove a call that has a result."""
        if (name := self._names.pop(call_id, None)) is not None:
            del self._ids[name][call_id]

    def first(self, name: str | None) -> str | None:
        """The id of the call that a result without one belongs to: the first of its tool, or the first of all."""
        of_tool = self._ids.get(name) if name is not None else None
        return next(iter(of_tool or self._names), None)


OLLAMA_CHAT = OllamaChat()


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, in Ollama's shapes; streamed line by line unless `stream` is false."""
    return await answer(request, OLLAMA_CHAT)
