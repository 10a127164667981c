"""`POST /v1/chat/completions/batch`: several conversations in one body, as vLLM has it, with one choice for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, structs

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.openai.chat import ChatReplies
from eventlm.server.openai.replies import ChatCompletion, Usage
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import (
    MAX_GROUP_SEQUENCES,
    UNSUPPORTED_IN_CHAT,
    WITHOUT_BEAM_SEARCH,
    ChatCompletionRequest,
    ChatMessage,
)

#: As in vLLM.
UNSUPPORTED_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_IN_CHAT,
    **WITHOUT_BEAM_SEARCH,
    "stream": (False,),
    "n": (1,),
    "tools": (),
    "tool_choice": ("none",),
}
_NAMES = [field.name for field in structs.fields(ChatCompletionRequest)]


class ChatBatchRequest(ChatCompletionRequest, kw_only=True):
    """Body of `POST /v1/chat/completions/batch`: that of a chat, with a list of conversations as `messages`."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[ChatMessage], Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_GROUP_SEQUENCES)
    ]

    def conversations(self) -> list[ChatCompletionRequest]:
        """The body of a chat for each conversation."""
        fields = {name: getattr(self, name) for name in _NAMES if name != "messages"}
        return [ChatCompletionRequest(messages=messages, **fields) for messages in self.messages]


class ChatBatchReplies(ReplyFormat):
    """Replies to several conversations: each one's choice is made as a chat's."""

    prompt_param = "messages"

    def __init__(
        self, body: ChatBatchRequest, context: ServerContext, group: Sequence[Request], identity: ReplyIdentity
    ) -> None:
        super().__init__(context.tokenizer, identity)
        self._body = body
        self._replies = [
            ChatReplies(conversation, context.tokenizer, [request], identity, context.formats)
            for conversation, request in zip(body.conversations(), group, strict=True)
        ]

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> ChatCompletion:
        wholes = [
            await replies.whole([output], generation) for replies, output in zip(self._replies, choices, strict=True)
        ]
        return ChatCompletion(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=[choice for whole in wholes for choice in whole.choices],
            usage=Usage.of(generation.token_counts()),
        )


class ChatBatch(Api[ChatBatchRequest]):
    """Several conversations."""

    prefix = "chatcmpl-"

    def decode(self, data: bytes) -> ChatBatchRequest:
        return decode_request(data, ChatBatchRequest, UNSUPPORTED_IN_BATCHES)

    async def make_requests(
        self,
        context: ServerContext,
        body: ChatBatchRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        if body.prompt_logprobs is not None:
            raise InputError("prompt_logprobs", "'prompt_logprobs' is not available for several conversations.")
        return Prepared(
            [
                await context.requests.chat(chat, received_ns, param=f"messages[{index}]", **scheduling)
                for index, chat in enumerate(body.conversations())
            ]
        )

    def reply_format(
        self,
        context: ServerContext,
        body: ChatBatchRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return ChatBatchReplies(body, context, group, identity)


CHAT_BATCH = ChatBatch()


async def chat_batch(request: web.Request) -> web.StreamResponse:
    """Answer several conversations.

    The choices are in the order of the conversations, one for each. The group is admitted as a whole. There are neither
    streams nor tools, and `n` is 1.
    """
    return await answer(request, CHAT_BATCH)
