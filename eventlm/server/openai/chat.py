"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from aiohttp import web
from msgspec import UNSET

from eventlm.engine.request import Request
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.openai.chunks import ChunkedReplies
from eventlm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from eventlm.server.openai.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    FunctionCall,
    FunctionCallDelta,
    TokenIds,
    ToolCall,
    ToolCallDelta,
    Usage,
    null_if_unset,
)
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.text.chat.messages import echoed_text
from eventlm.text.choice_output import ApiFinishReason, ChoiceOutput, api_finish_reason, each_in_turn
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.forwarding.bodies import ForwardedChatRequest, decode_forwarded
from eventlm.text.generation import Generation
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats
from eventlm.text.tools.message import MessageDelta, MessageParser, message_format


class ChatReplies(ChunkedReplies):
    """Chat replies."""

    prompt_param = "messages"

    def __init__(
        self,
        body: ChatCompletionRequest,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        formats: Formats = NO_FORMATS,
    ) -> None:
        super().__init__(body, tokenizer, identity)
        [request] = group
        self._request = request
        self._body: ChatCompletionRequest = body
        self._role = body.reply_role
        self._echo = echoed_text(body)
        returns_ids = body.return_token_ids and request.forwarded is None
        self._prompt_ids: TokenIds = request.prompt_token_ids if returns_ids else UNSET
        self._format = message_format(request)
        self._formats = formats
        self._is_text = self._format.is_plain and request.forwarded is None
        #: Of the choices of a stream, unless all text is content.
        self._parsers: dict[int, MessageParser] = {}

    def opening(self, choice: int) -> ChatCompletionChunk:
        choices = [ChatChunkChoice(choice, ChatDelta(role=self._role, content=""))]
        return self._chunk(choices, prompt_ids=self._prompt_ids)

    def begin(self, generation: Generation) -> Sequence[Any]:
        openings = super().begin(generation)
        if not self._echo:
            return openings
        chunks = [
            (self._chunk([ChatChunkChoice(choice, ChatDelta(content=self._echo))]), generation.beginning(choice))
            for choice in range(generation.num_choices)
        ]
        return [*openings, *(self._with_usage(chunk, output, generation) for chunk, output in chunks)]

    def delta(self, output: ChoiceOutput) -> ChatCompletionChunk | None:
        token_ids = self._token_ids(output)
        if self._is_text:
            has_content, delta = bool(output.text), ChatDelta(content=output.text)
        else:
            message = self._parse(output)
            has_content, delta = bool(message), message_delta(message, self.identity.reply_id, output.choice)
        logprobs = self._logprobs(output)
        if not has_content and logprobs is None and not token_ids:
            return None
        return self._chunk([ChatChunkChoice(output.choice, delta, logprobs, token_ids=token_ids)])

    def finish(self, output: ChoiceOutput) -> ChatCompletionChunk:
        reason = self._finish_reason(output, self._parsers.get(output.choice))
        ids: TokenIds = [] if self._returns_token_ids else UNSET
        return self._chunk([ChatChunkChoice(output.choice, ChatDelta(), None, reason, output.stop_reason, ids)])

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> ChatCompletion:
        return ChatCompletion(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=await each_in_turn(self.choice, choices),
            usage=Usage.of(generation.token_counts()),
            prompt_logprobs=prompt_logprobs(self._tokenizer, self._request, choices[0], self._body.prompt_logprobs),
            prompt_token_ids=null_if_unset(self._prompt_ids),
        )

    def choice(self, output: ChoiceOutput) -> ChatChoice:
        """One of the answers, from all of its output."""
        parser = MessageParser(self._format, self._formats)
        message = parser.message(output)
        return ChatChoice(
            output.choice,
            reply_message(message, self.identity.reply_id, output.choice, role=self._role, echo=self._echo),
            self._finish_reason(output, parser),
            self._logprobs(output),
            output.stop_reason,
            null_if_unset(self._token_ids(output)),
        )

    def _logprobs(self, output: ChoiceOutput) -> ChatLogprobs | None:
        return chat_logprobs(
            self._tokenizer,
            output,
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
            is_named=self._body.logprob_token_ids is not None,
        )

    def _parse(self, output: ChoiceOutput) -> MessageDelta:
        """The part of the message in a stream's next output."""
        parser = self._parsers.get(output.choice)
        if parser is None:
            parser = self._parsers[output.choice] = MessageParser(self._format, self._formats)
        return parser.message(output)

    def _finish_reason(self, output: ChoiceOutput, parser: MessageParser | None) -> ApiFinishReason:
        """As OpenAI's: a call that was forced by the name of its tool ends with "stop"."""
        assert output.finished is not None
        reason = api_finish_reason(output.finished.reason)
        if self._request.forwarded is not None or reason == "length" or parser is None or not parser.num_calls:
            return reason
        return "tool_calls" if parser.calls_are_complete and not self._format.is_named else "stop"

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, *, prompt_ids: TokenIds = UNSET
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=choices,
            usage=self._no_usage if usage is None else usage,
            prompt_token_ids=prompt_ids,
        )


def call_id(reply_id: str, choice: int, call: int) -> str:
    """The id of a call, the same whenever the reply is made again from its tokens."""
    return f"call_{blake2b(f'{reply_id}/{choice}/{call}'.encode(), digest_size=12).hexdigest()}"


def reply_message(
    message: MessageDelta, reply_id: str, choice: int, *, role: str = "assistant", echo: str = ""
) -> ChatReplyMessage:
    """A whole message, after `echo`."""
    calls = [
        ToolCall(id=call_id(reply_id, choice, call.index), function=FunctionCall(call.name, call.arguments))
        for call in message.calls
    ]
    reasoning = message.reasoning or UNSET
    return ChatReplyMessage(
        echo + message.content or (None if calls else ""),
        role,
        tool_calls=calls or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )


def message_delta(message: MessageDelta, reply_id: str, choice: int) -> ChatDelta:
    """The next part of a message."""
    calls = [
        ToolCallDelta(
            index=call.index,
            id=call_id(reply_id, choice, call.index) if call.name else UNSET,
            type="function" if call.name else UNSET,
            function=FunctionCallDelta(call.arguments, call.name or UNSET),
        )
        for call in message.calls
    ]
    reasoning = message.reasoning or UNSET
    has_nothing_else = not calls and not message.reasoning
    return ChatDelta(
        content=message.content if message.content or has_nothing_else else UNSET,
        tool_calls=calls or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )


class Chat(Api[ChatCompletionRequest]):
    """Conversations."""

    prefix = "chatcmpl-"
    path = "/v1/chat/completions"

    def decode(self, data: bytes) -> ChatCompletionRequest:
        return decode_request(data, ChatCompletionRequest, UNSUPPORTED_IN_CHAT)

    def decode_forwarded(self, data: bytes) -> ChatCompletionRequest:
        return decode_forwarded(data, ForwardedChatRequest)

    async def make_requests(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        return Prepared([await context.requests.chat(body, received_ns, **scheduling)])

    def reply_format(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return ChatReplies(body, context.tokenizer, group, identity, context.formats)


CHAT = Chat()


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer(request, CHAT)
