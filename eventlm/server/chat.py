"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.server.chat_messages import chat_messages
from eventlm.server.chat_template import RESERVED_NAMES, ChatTemplateError
from eventlm.server.context import CONTEXT, ServerContext, read_body
from eventlm.server.errors import invalid_value
from eventlm.server.generation import ChoiceOutput, Generation
from eventlm.server.logprobs import chat_logprobs, prompt_logprobs
from eventlm.server.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest, decode_request
from eventlm.server.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    TokenIds,
    Usage,
    api_finish_reason,
)
from eventlm.server.stream import answer
from eventlm.server.tokenizer import Tokenizer
from eventlm.server.validation import check_request, engine_request, truncate_prompt


class ChatReplies:
    """The shapes of chat replies."""

    prompt_param = "messages"

    def __init__(self, body: ChatCompletionRequest, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_ids: TokenIds = prompt_token_ids if body.return_token_ids else UNSET
        self.reply_id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        #: Chunks of a stream that will report its usage carry a null until then.
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: int) -> ChatCompletionChunk:
        choices = [ChatChunkChoice(choice, ChatDelta(role="assistant", content=""))]
        return self._chunk(choices, prompt_ids=self._prompt_ids)

    def delta(self, output: ChoiceOutput) -> ChatCompletionChunk | None:
        token_ids = self._token_ids(output)
        if not output.text and output.logprobs is None and not token_ids:
            return None
        logprobs = self._logprobs(output)
        delta = ChatDelta(content=output.text)
        return self._chunk([ChatChunkChoice(output.choice, delta, logprobs, token_ids=token_ids)])

    def finish(self, output: ChoiceOutput) -> ChatCompletionChunk:
        assert output.finished is not None
        reason = api_finish_reason(output.finished.reason)
        return self._chunk([ChatChunkChoice(output.choice, ChatDelta(), None, reason, output.stop_reason)])

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> ChatCompletion:
        [request] = generation.group
        return ChatCompletion(
            id=self.reply_id,
            created=self._created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=[self._choice(output) for output in choices],
            usage=generation.usage(),
            prompt_logprobs=prompt_logprobs(self._tokenizer, request, choices[0], self._body.prompt_logprobs),
            prompt_token_ids=self._prompt_ids,
        )

    def _choice(self, output: ChoiceOutput) -> ChatChoice:
        assert output.finished is not None
        return ChatChoice(
            output.choice,
            ChatReplyMessage(output.text),
            api_finish_reason(output.finished.reason),
            self._logprobs(output),
            output.stop_reason,
            self._token_ids(output),
        )

    def _logprobs(self, output: ChoiceOutput) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, output, as_token_ids=bool(self._body.return_tokens_as_token_ids))

    def _token_ids(self, output: ChoiceOutput) -> TokenIds:
        return output.token_ids if self._body.return_token_ids else UNSET

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, *, prompt_ids: TokenIds = UNSET
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.reply_id,
            created=self._created,
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
    limits = context.limits
    check_request(body, limits)
    grammar = await context.grammars.requested(body)
    prompt_token_ids = await encode_messages(context, body)
    group = [
        engine_request(
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
    ]
    replies = ChatReplies(body, context.tokenizer, prompt_token_ids)
    return await answer(request, body, group, replies)


async def encode_messages(context: ServerContext, body: ChatCompletionRequest) -> list[int]:
    """The token ids of the conversation under the model's template, the last ones if so asked. Raises ApiError."""
    template = context.tokenizer.chat_template
    if template is None:
        raise invalid_value(
            "messages", "This model has no chat template; use /v1/completions, or a model that was made for chat."
        )
    messages = chat_messages(body, knows_developer=template.knows_developer)
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise invalid_value(param, f"Invalid value for '{param}': the server sets this variable itself.")
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
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=variables,
            add_special_tokens=bool(body.add_special_tokens),
        )
    except ChatTemplateError as error:
        raise invalid_value("messages", f"Invalid value for 'messages': {error}.") from error
    return truncate_prompt(body, token_ids, context.limits)
