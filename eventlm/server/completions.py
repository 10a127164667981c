"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.control.request import EngineRequest
from eventlm.server.context import CONTEXT, ServerContext, read_body
from eventlm.server.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest, decode_request
from eventlm.server.replies import ApiFinishReason, Completion, CompletionChoice, Usage
from eventlm.server.stream import answer
from eventlm.server.validation import check_request, completion_prompts, engine_request


class CompletionReplies:
    """The shapes of completion replies."""

    prompt_param = "prompt"

    def __init__(self, model: str, *, with_usage: bool) -> None:
        self._model = model
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: int) -> None:
        return None

    def delta(self, choice: int, text: str) -> Completion:
        return self._chunk([CompletionChoice(choice, text)])

    def finish(self, choice: int, reason: ApiFinishReason) -> Completion:
        return self._chunk([CompletionChoice(choice, "", reason)])

    def usage(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    def whole(self, texts: list[str], reasons: list[ApiFinishReason], usage: Usage) -> Completion:
        choices = [
            CompletionChoice(index, text, reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._chunk(choices, usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._no_usage if usage is None else usage,
        )


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts as they stand."""
    context = request.app[CONTEXT]
    received_ns = context.engine.now_ns()
    body = decode_request(await read_body(request), CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)
    check_request(body, context.limits)
    group = await _group(context, body, received_ns)
    generation = await context.submit(group, prompt_param=CompletionReplies.prompt_param)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return await answer(request, body, generation, CompletionReplies(body.model, with_usage=with_usage))


async def _group(context: ServerContext, body: CompletionRequest, received_ns: int) -> list[EngineRequest]:
    limits = context.limits
    add_special_tokens = body.add_special_tokens is not False
    group = []
    for prompt in completion_prompts(body, limits.vocab_size):
        if isinstance(prompt, str):
            prompt = await context.encoder.encode(prompt, add_special_tokens=add_special_tokens)
        group.append(
            engine_request(
                body,
                prompt,
                defaults=context.defaults,
                limits=limits,
                prompt_param=CompletionReplies.prompt_param,
                received_ns=received_ns,
                ready_ns=context.engine.now_ns(),
            )
        )
    return group
