"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.engine.request import Request
from eventlm.server.context import CONTEXT, read_body
from eventlm.server.logprobs import chat_logprobs, prompt_logprobs
from eventlm.server.message_responses import message_delta, reply_message
from eventlm.server.middleware import take_request_id
from eventlm.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ReplyIdentity,
    TokenIds,
    Usage,
)
from eventlm.server.stream import answer
from eventlm.text.choice_output import ApiFinishReason, ChoiceOutput, api_finish_reason, each_in_turn
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats
from eventlm.text.tools.message import MessageDelta, MessageParser, message_format, parse_message

#: How the ids of chats begin.
CHAT_PREFIX = "chatcmpl"


class ChatReplies:
    """The shapes of chat replies."""

    prompt_param = "messages"
    echoes: Sequence[Echo] = ()

    def __init__(
        self,
        body: ChatCompletionRequest,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        formats: Formats = NO_FORMATS,
    ) -> None:
        [request] = group
        self.identity = identity
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_ids: TokenIds = request.prompt_token_ids if body.return_token_ids else UNSET
        self._format = message_format(request)
        self._formats = formats
        #: Of the choices of a stream; none if all text is content.
        self._parsers: dict[int, MessageParser] = {}
        #: Chunks of a stream that will report its usage carry a null until then.
        self._no_usage: UnsetType | None = None if body.includes_usage else UNSET

    def opening(self, choice: int) -> ChatCompletionChunk:
        choices = [ChatChunkChoice(choice, ChatDelta(role="assistant", content=""))]
        return self._chunk(choices, prompt_ids=self._prompt_ids)

    def delta(self, output: ChoiceOutput) -> ChatCompletionChunk | None:
        token_ids = self._token_ids(output)
        if self._format.is_plain:
            says_something, delta = bool(output.text), ChatDelta(content=output.text)
        else:
            message = self._parse(output)
            says_something, delta = bool(message), message_delta(message, self.identity.reply_id, output.choice)
        if not says_something and output.logprobs is None and not token_ids:
            return None
        return self._chunk([ChatChunkChoice(output.choice, delta, self._logprobs(output), token_ids=token_ids)])

    def finish(self, output: ChoiceOutput) -> ChatCompletionChunk:
        reason = self._finish_reason(output, self._parsers.get(output.choice))
        return self._chunk([ChatChunkChoice(output.choice, ChatDelta(), None, reason, output.stop_reason)])

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> ChatCompletion:
        [request] = generation.group
        return ChatCompletion(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=await each_in_turn(self._choice, choices),
            usage=Usage.of(generation.token_counts()),
            prompt_logprobs=prompt_logprobs(self._tokenizer, request, choices[0], self._body.prompt_logprobs),
            prompt_token_ids=self._prompt_ids,
        )

    def _choice(self, output: ChoiceOutput) -> ChatChoice:
        message, parser = parse_message(output.text, self._format, self._formats)
        return ChatChoice(
            output.choice,
            reply_message(message, self.identity.reply_id, output.choice),
            self._finish_reason(output, parser),
            self._logprobs(output),
            output.stop_reason,
            self._token_ids(output),
        )

    def _logprobs(self, output: ChoiceOutput) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, output, as_token_ids=bool(self._body.return_tokens_as_token_ids))

    def _token_ids(self, output: ChoiceOutput) -> TokenIds:
        return output.token_ids if self._body.return_token_ids else UNSET

    def _parse(self, output: ChoiceOutput) -> MessageDelta:
        """What a stream's next output adds to its message, the rest included if it is the last."""
        parser = self._parsers.get(output.choice)
        if parser is None:
            parser = self._parsers[output.choice] = MessageParser(self._format, self._formats)
        message = parser.push(output.text)
        if output.finished is not None:
            message.add(parser.close())
        return message

    def _finish_reason(self, output: ChoiceOutput, parser: MessageParser | None) -> ApiFinishReason:
        """As OpenAI does: a call that was forced by its tool's name ends with "stop"."""
        assert output.finished is not None
        reason = api_finish_reason(output.finished.reason)
        if reason == "length" or parser is None or not parser.num_calls:
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


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    context = request.app[CONTEXT]
    received_ns = context.engine.now_ns()
    body = decode_request(await read_body(request), ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
    take_request_id(request, body.request_id)
    group = [await context.requests.chat(body, received_ns)]
    replies = ChatReplies(body, context.tokenizer, group, ReplyIdentity.draw(CHAT_PREFIX), context.formats)
    return await answer(request, body, group, replies)
