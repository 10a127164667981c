"""`POST /api/generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.model_card import rfc3339
from eventlm.server.ollama.chat import chat_request
from eventlm.server.ollama.lines import OllamaReplies, OllamaReply, OllamaToolCall
from eventlm.server.ollama.options import NATIVE_NAMES, OllamaFields, response_format, served_name
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.translation import limited, native_fields, within_limits
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.protocol import ChatMessage, CompletionRequest

#: Fields without support, each with the values that ask for nothing.
UNSUPPORTED_IN_GENERATE: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
    "images": ([],),
}


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """Body of `POST /api/generate`. Without a prompt the reply says that the model is loaded.

    raw: the prompt goes to the model as it is, else as a user's message, after `system` if there is one.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaGenerateReply(OllamaReply, frozen=True, kw_only=True):
    """Reply of `/api/generate`, and a line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaGenerateReplies(OllamaReplies):
    """Replies with a text."""

    prompt_param = "prompt"

    def line(
        self, *, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> Any:
        return OllamaGenerateReply(response=content, thinking=thinking or UNSET, **self.fixed_fields(), **fields)


class OllamaGenerate(Api[OllamaGenerateRequest]):
    """Answers to one prompt, in Ollama's shapes."""

    prefix = "ollama-generate-"
    takes_any_type = True

    def decode(self, data: bytes) -> OllamaGenerateRequest:
        body = decode_request(data, OllamaGenerateRequest, UNSUPPORTED_IN_GENERATE)
        if body.raw and body.system:
            raise InputError("system", "'system' is not allowed when 'raw' is true; write it into the prompt.")
        return body

    def without_generation(self, context: ServerContext, body: OllamaGenerateRequest) -> OllamaGenerateReply | None:
        served_name(context, body.model)
        if body.prompt:
            return None
        return OllamaGenerateReply(
            model=body.model,
            created_at=rfc3339(context.system.clock.unix_s()),
            response="",
            done=True,
            done_reason=body.load_reason,
        )

    async def make_requests(
        self,
        context: ServerContext,
        body: OllamaGenerateRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        # Models without a template continue what they are given, as they do with Ollama.
        if body.raw or not (context.forwards or context.tokenizer.chat_template):
            request = await _continuation(context, body, received_ns, scheduling)
        else:
            messages = [ChatMessage(role="system", content=body.system)] if body.system else []
            messages.append(ChatMessage(role="user", content=body.prompt))
            with native_fields({"messages": "prompt"}):
                request = await chat_request(context, body, messages, None, received_ns, scheduling)
        return Prepared(within_limits([request], body.used_options.most_tokens, caller.principal.limits))

    def reply_format(
        self,
        context: ServerContext,
        body: OllamaGenerateRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return OllamaGenerateReplies(body, context.tokenizer, group, identity, context.formats)

    def wants_stream(self, body: OllamaGenerateRequest) -> bool:
        return body.stream is not False


async def _continuation(
    context: ServerContext, body: OllamaGenerateRequest, received_ns: int, scheduling: Mapping[str, Any]
) -> Request:
    """The request for a prompt as it is. Raises InputError."""
    options = body.used_options
    with native_fields(NATIVE_NAMES):
        completion = CompletionRequest(
            model=served_name(context, body.model),
            prompt=body.prompt or "",
            response_format=response_format(body.format),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **options.fields(),
        )
        [request], _ = await context.requests.completions(completion, received_ns, **scheduling)
    return limited(request, options.most_tokens)


OLLAMA_GENERATE = OllamaGenerate()


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """Answer a prompt, in Ollama's shapes; streamed line by line unless `stream` is false."""
    return await answer(request, OLLAMA_GENERATE)
