"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET

from eventlm.engine.request import Request
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.openai.chunks import ChunkedReplies
from eventlm.server.openai.logprobs import CompletionLogprobsMaker, join_logprobs, prompt_logprobs
from eventlm.server.openai.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenIds,
    Usage,
    null_if_unset,
)
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.text.choice_output import ChoiceOutput, api_finish_reason, each_in_turn
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.forwarding.bodies import ForwardedCompletionRequest, decode_forwarded
from eventlm.text.generation import Generation
from eventlm.text.protocol import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest
from eventlm.text.tokenizer import Tokenizer


class CompletionReplies(ChunkedReplies):
    """Completion replies. `echoes` are the prompts to show, if any."""

    prompt_param = "prompt"

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(body, tokenizer, identity, echoes)
        self._body: CompletionRequest = body
        #: One for each choice.
        self._requests = [request for request in group for _ in range(request.n)]
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]
        #: Of chunks without tokens. vLLM's streams have these fields in all chunks, if they are asked for.
        self._no_token_ids: TokenIds = [] if body.return_token_ids else UNSET
        has_empty = body.return_token_ids and body.logprobs is not None
        self._no_logprobs = CompletionLogprobs([], [], [], []) if has_empty else None
        #: Prompt tokens shown so far, if they are shown with their log-probabilities.
        self._num_echoed = [1] * len(self._echoes)
        self._logprobs = CompletionLogprobsMaker(
            tokenizer,
            num_top=body.logprobs or 0,
            num_named=len(body.logprob_token_ids or ()),
            skip_special_tokens=body.skip_special_tokens is not False,
            as_token_ids=bool(body.return_tokens_as_token_ids),
            echoed_characters=lambda choice: len(self._echoes[choice].text) if self._echoes else 0,
        )

    def opening(self, choice: int) -> Completion | None:
        if not self._echoes and not self._body.return_token_ids:
            return None
        text, logprobs = self._echo_start(choice)
        ids, prompt_ids = self._no_token_ids, self._prompt_ids(choice)
        logprobs = logprobs or self._no_logprobs
        return self._chunk([CompletionChoice(choice, text, None, logprobs, token_ids=ids, prompt_token_ids=prompt_ids)])

    def delta(self, output: ChoiceOutput) -> Completion | None:
        text, logprobs = self._content(output)
        token_ids = self._token_ids(output)
        if not text and logprobs is None and not token_ids:
            return None
        return self._chunk([CompletionChoice(output.choice, text, None, logprobs, token_ids=token_ids)])

    def finish(self, output: ChoiceOutput) -> Completion:
        assert output.finished is not None
        reason = api_finish_reason(output.finished.reason)
        logprobs, ids = self._no_logprobs, self._no_token_ids
        return self._chunk([CompletionChoice(output.choice, "", reason, logprobs, output.stop_reason, token_ids=ids)])

    def usage(self, usage: Usage) -> Completion:
        return self._chunk([], usage)

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Completion:
        return self._chunk(await each_in_turn(self._choice, choices), Usage.of(generation.token_counts()))

    def _choice(self, output: ChoiceOutput) -> CompletionChoice:
        assert output.finished is not None
        start, first = self._echo_start(output.choice)
        text, logprobs = self._content(output)
        request = self._requests[output.choice]
        return CompletionChoice(
            output.choice,
            start + text,
            api_finish_reason(output.finished.reason),
            join_logprobs([first, logprobs]),
            output.stop_reason,
            prompt_logprobs(self._tokenizer, request, output, self._body.prompt_logprobs),
            null_if_unset(self._token_ids(output)),
            null_if_unset(self._prompt_ids(output.choice)),
        )

    def _echo_start(self, choice: int) -> tuple[str, CompletionLogprobs | None]:
        """The part of a prompt that is shown at once: all of it, or the first token before log-probabilities."""
        if not self._echoes:
            return "", None
        if self._body.logprobs is None:
            return self._echoes[choice].text, None
        part = self._echoes[choice].part(0, 1)
        return part.text, self._logprobs.prompt_start(part)

    def _content(self, output: ChoiceOutput) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities of an output, after those of echoed prompt tokens."""
        logprobs = self._logprobs.output(output)
        found = output.prompt_logprobs
        if found is None or not self._echoes or self._body.logprobs is None:
            return output.text, logprobs
        start = self._num_echoed[output.choice]
        end = self._num_echoed[output.choice] = start + len(found.logprobs)
        part = self._echoes[output.choice].part(start, end)
        return part.text + output.text, join_logprobs([self._logprobs.prompt(part, found), logprobs])

    def _prompt_ids(self, choice: int) -> TokenIds:
        request = self._requests[choice]
        return request.prompt_token_ids if self._body.return_token_ids and request.forwarded is None else UNSET

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            choices=choices,
            usage=self._no_usage if usage is None else usage,
        )


class Completions(Api[CompletionRequest]):
    """Continuations of prompts."""

    prefix = "cmpl-"
    path = "/v1/completions"

    def decode(self, data: bytes) -> CompletionRequest:
        return decode_request(data, CompletionRequest, UNSUPPORTED_IN_COMPLETIONS)

    def decode_forwarded(self, data: bytes) -> CompletionRequest:
        return decode_forwarded(data, ForwardedCompletionRequest)

    async def make_requests(
        self,
        context: ServerContext,
        body: CompletionRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        return Prepared(*await context.requests.completions(body, received_ns, **scheduling))

    def reply_format(
        self,
        context: ServerContext,
        body: CompletionRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return CompletionReplies(body, context.tokenizer, group, identity, echoes)


COMPLETIONS = Completions()


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts as they stand."""
    return await answer(request, COMPLETIONS)
