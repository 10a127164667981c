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
    ChatReplyMessage,
    Usage,
    api_finish_reason,
)
from eventlm.server.stream import answer
from eventlm.server.tokenizer import Tokenizer
from eventlm.server.validation import check_request, engine_request


class ChatReplies:
    """The shapes of chat replies."""

    prompt_param = "messages"

    def __init__(self, model: str, tokenizer: Tokenizer, *, with_usage: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.reply_id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        #: Chunks of a stream that will report its usage carry a null until then.
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: int) -> ChatCompletionChunk:
        return self._chunk([ChatChunkChoice(choice, ChatDelta(role="assistant", content=""))])

    def delta(self, output: ChoiceOutput) -> ChatCompletionChunk | None:
        if not output.text and output.logprobs is None:
            return None
        logprobs = chat_logprobs(self._tokenizer, output)
        return self._chunk([ChatChunkChoice(output.choice, ChatDelta(content=output.text), logprobs)])

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
            model=self._model,
            choices=[self._choice(output) for output in choices],
            usage=generation.usage(),
            prompt_logprobs=prompt_logprobs(self._tokenizer, request, choices[0]),
        )

    def _choice(self, output: ChoiceOutput) -> ChatChoice:
        assert output.finished is not None
        return ChatChoice(
            output.choice,
            ChatReplyMessage(output.text),
            api_finish_reason(output.finished.reason),
            chat_logprobs(self._tokenizer, output),
            output.stop_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.reply_id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._no_usage if usage is None else usage,
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
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    replies = ChatReplies(body.model, context.tokenizer, with_usage=with_usage)
    return await answer(request, body, group, replies)


async def encode_messages(context: ServerContext, body: ChatCompletionRequest) -> list[int]:
    """The token ids of the conversation under the model's template. Raises ApiError."""
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
        return await context.encoder.encode_chat(
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
