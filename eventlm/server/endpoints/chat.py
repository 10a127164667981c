"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.engine.request import EngineRequest
from eventlm.server.chat_messages import chat_messages
from eventlm.server.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplateError
from eventlm.server.choice_output import ChoiceOutput, each_in_turn
from eventlm.server.context import CONTEXT, ServerContext, read_body
from eventlm.server.decoding import decode_request
from eventlm.server.echo import Echo
from eventlm.server.errors import invalid_value
from eventlm.server.generation import Generation
from eventlm.server.logprobs import chat_logprobs, prompt_logprobs
from eventlm.server.message_responses import message_delta, reply_message
from eventlm.server.middleware import take_request_id
from eventlm.server.prompt_encoder import CHARACTERS_OF_A_MESSAGE
from eventlm.server.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.server.responses import (
    ApiFinishReason,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ReplyIdentity,
    TokenIds,
    Usage,
    api_finish_reason,
)
from eventlm.server.stream import answer
from eventlm.server.tokenizer import Tokenizer
from eventlm.server.tools.definitions import ToolUse
from eventlm.server.tools.formats import NO_FORMATS, Formats
from eventlm.server.tools.message import MessageDelta, MessageParser, message_format, parse_message
from eventlm.server.tools.request import requested_format, requested_grammar, requested_tools, with_format
from eventlm.server.tools.teaching import teach
from eventlm.server.validation import check_request, engine_request, truncate_prompt

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
        group: Sequence[EngineRequest],
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
            usage=generation.usage(),
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
    limits = context.limits
    check_request(body, limits)
    formats, tokenizer = context.formats, context.tokenizer
    tools = requested_tools(body, formats)
    content_grammar = await context.grammars.requested(body)
    prompt_token_ids = await encode_messages(context, body, tools)
    format = requested_format(body, tools, formats, tokenizer, prompt_token_ids)
    grammar = await requested_grammar(tools, format, formats, tokenizer, content_grammar, context.grammars)
    chat = engine_request(
        body,
        prompt_token_ids,
        defaults=context.defaults,
        limits=limits,
        bad_words=await context.encoder.encode_bad_words(body.bad_words or []),
        grammar=grammar,
        prompt_param=ChatReplies.prompt_param,
        received_ns=received_ns,
        ready_ns=context.engine.now_ns(),
    )
    group = [with_format(chat, format, formats, tokenizer)]
    replies = ChatReplies(body, tokenizer, group, ReplyIdentity.draw(CHAT_PREFIX), formats)
    return await answer(request, body, group, replies)


async def encode_messages(
    context: ServerContext, body: ChatCompletionRequest, tools: ToolUse | None = None
) -> list[int]:
    """The token ids of the conversation under the model's template, the last ones if so asked. Raises ApiError."""
    template = context.tokenizer.chat_template
    if template is None:
        raise invalid_value(
            "messages", "This model has no chat template; use /v1/completions, or a model that was made for chat."
        )
    definitions = tools.definitions if tools is not None else None
    num_parts = sum(len(each.content) if isinstance(each.content, list) else 1 for each in body.messages)
    messages = await context.encoder.run(
        CHARACTERS_OF_A_MESSAGE * num_parts, lambda: _template_messages(context.formats, body, template, definitions)
    )
    if body.documents and "documents" not in template.source:
        raise invalid_value(
            "documents",
            "'documents' are not supported by this model: its chat template does not read them; write them into a "
            "message.",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid_value(
            "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other: the one goes on with the last "
            "message, the other begins a new one.",
        )
    try:
        token_ids = await context.encoder.encode_chat(
            template,
            messages,
            tools=definitions,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=_variables(template, body),
            add_special_tokens=bool(body.add_special_tokens),
        )
    except ChatTemplateError as error:
        raise invalid_value("messages", f"Invalid value for 'messages': {error}.") from error
    return truncate_prompt(body, token_ids, context.limits)


def _template_messages(
    formats: Formats, body: ChatCompletionRequest, template: ChatTemplate, definitions: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages for the template, with the tools in them if it does not know of any. Raises ApiError."""
    messages = chat_messages(body, knows_developer=template.knows_developer)
    if template.knows_tools or formats.tools is None:
        return messages
    try:
        return teach(messages, definitions or [], formats.tools.syntax)
    except RecursionError as error:
        raise invalid_value("messages", "Tools or their calls are nested too deeply.") from error


def _variables(template: ChatTemplate, body: ChatCompletionRequest) -> dict[str, Any]:
    """What the body sets of the template's own variables. Raises ApiError."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise invalid_value(param, f"Invalid value for '{param}': the server sets this variable itself.")
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" in template.source:
        variables["reasoning_effort"] = effort
    elif effort not in (None, "none"):
        raise invalid_value(
            "reasoning_effort",
            "'reasoning_effort' is not supported by this model: its chat template does not read it; leave it out.",
        )
    return variables
