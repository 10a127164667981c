"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from eventlm.control.request import EngineRequest
from eventlm.server.context import CONTEXT, ServerContext, read_body
from eventlm.server.generation import ChoiceOutput, Generation
from eventlm.server.logprobs import CompletionLogprobsMaker, prompt_logprobs
from eventlm.server.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest, decode_request
from eventlm.server.replies import Completion, CompletionChoice, Usage, api_finish_reason
from eventlm.server.stream import answer
from eventlm.server.tokenizer import Tokenizer
from eventlm.server.validation import check_request, completion_prompts, engine_request


class CompletionReplies:
    """The shapes of completion replies."""

    prompt_param = "prompt"

    def __init__(self, model: str, tokenizer: Tokenizer, *, with_usage: bool, skip_special_tokens: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = CompletionLogprobsMaker(tokenizer, skip_special_tokens=skip_special_tokens)
        self.reply_id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: int) -> None:
        return None

    def delta(self, output: ChoiceOutput) -> Completion | None:
        if not output.text and output.logprobs is None:
            return None
        return self._chunk([CompletionChoice(output.choice, output.text, None, self._logprobs.make(output))])

    def finish(self, output: ChoiceOutput) -> Completion:
        assert output.finished is not None
        reason = api_finish_reason(output.finished.reason)
        return self._chunk([CompletionChoice(output.choice, "", reason, None, output.stop_reason)])

    def usage(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Completion:
        requests = [request for request in generation.group for _ in range(request.n)]
        found = [self._choice(output, request) for output, request in zip(choices, requests, strict=True)]
        return self._chunk(found, generation.usage())

    def _choice(self, output: ChoiceOutput, request: EngineRequest) -> CompletionChoice:
        assert output.finished is not None
        return CompletionChoice(
            output.choice,
            output.text,
            api_finish_reason(output.finished.reason),
            self._logprobs.make(output),
            output.stop_reason,
            prompt_logprobs(self._tokenizer, request, output),
        )

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.reply_id,
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
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    replies = CompletionReplies(
        body.model,
        context.tokenizer,
        with_usage=with_usage,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return await answer(request, body, group, replies)


async def _group(context: ServerContext, body: CompletionRequest, received_ns: int) -> list[EngineRequest]:
    limits = context.limits
    add_special_tokens = body.add_special_tokens is not False
    bad_words = await context.encoder.encode_bad_words(body.bad_words or [])
    grammar = await context.grammars.requested(body)
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
                bad_words=bad_words,
                grammar=grammar,
                prompt_param=CompletionReplies.prompt_param,
                received_ns=received_ns,
                ready_ns=context.engine.now_ns(),
            )
        )
    return group
