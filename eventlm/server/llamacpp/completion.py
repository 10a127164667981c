"""`POST /completion`: continuations in llama.cpp's own shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from eventlm.engine.backend import AnswerDelta
from eventlm.engine.request import Request
from eventlm.metrics.rows import RequestRow
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.errors import ApiError
from eventlm.server.llamacpp.request import UNSUPPORTED, LlamaCompletionRequest, completion_requests
from eventlm.server.llamacpp.settings import GenerationSettings, generation_settings
from eventlm.server.openai.logprobs import SMALLEST_LOGPROB, reported_logprobs
from eventlm.server.openai.replies import TokenLogprob, TopLogprob
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity, StreamFormat
from eventlm.server.timings import EventlmReply, timings
from eventlm.server.translation import within_limits
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer, token_text
from eventlm.types import NANOSECONDS_PER_MILLISECOND, FinishReason

#: How each kind of end is called; all others are an end of sequence.
_STOP_TYPES: dict[FinishReason, str] = {"length": "limit", "complete": "limit", "stop": "word"}


class TokenProbability(Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class OutputProbability(TokenProbability, frozen=True, kw_only=True):
    """A token of the output, with the most likely ones at its position, best first."""

    top_logprobs: list[TokenProbability]


class LlamaTimings(Struct, frozen=True, kw_only=True):
    """Tokens and times in ms: of the prompt's cached part and of the computed one, and of the output."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCompletion(Struct, frozen=True, kw_only=True):
    """A part of a stream, or with `stop` its end or a whole reply. From `model` on: only then.

    id_slot: -1, since there are no slots. tokens_evaluated: of the prompt. tokens_cached: of those, how many came from
    the prefix cache. truncated: the context was full.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[OutputProbability] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: GenerationSettings | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET


class LlamaReplies(StreamFormat):
    """Replies to all prompts. A stream has the parts of all choices and an end of each."""

    prompt_param = "prompt"

    def __init__(
        self,
        body: LlamaCompletionRequest,
        context: ServerContext,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(context.tokenizer, identity, echoes)
        self._body = body
        self._model = body.model
        self._max_model_len = context.engine.max_model_len
        #: For each choice: its request and the text of its prompt.
        self._sources = [
            (request, echo.text) for request, echo in zip(group, echoes, strict=True) for _ in range(request.n)
        ]
        #: The choices of a stream that have a line break.
        self._with_new_line: set[int] = set()

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        if "\n" in output.text:
            self._with_new_line.add(output.choice)
        found: list[Any] = []
        if output.text or output.token_ids:
            found.append(self._part(output, output.text, output.token_ids, probabilities=self._probabilities(output)))
        if output.finished is not None:
            found.append(self._selected(self._end(output, generation.rows.get(output.choice), "", [])))
        return found

    def end(self, generation: Generation) -> Sequence[Any]:
        return ()

    def failure(self, error: ApiError) -> Sequence[Any]:
        return [error.envelope]

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        found = []
        for output in choices:
            if "\n" in output.text:
                self._with_new_line.add(output.choice)
            tokens = output.token_ids if self._body.return_tokens else []
            row, probabilities = generation.rows.get(output.choice), self._probabilities(output)
            found.append(self._selected(self._end(output, row, output.text, tokens, probabilities)))
        return found[0] if len(found) == 1 else found

    def _part(
        self,
        output: ChoiceOutput,
        content: str,
        tokens: list[int],
        *,
        probabilities: list[OutputProbability] | UnsetType = UNSET,
        **fields: Any,
    ) -> LlamaCompletion:
        request, _ = self._sources[output.choice]
        return LlamaCompletion(
            index=output.choice,
            content=content,
            tokens=tokens,
            stop=bool(fields),
            tokens_predicted=output.num_tokens,
            tokens_evaluated=len(request.prompt_token_ids),
            completion_probabilities=probabilities,
            **fields,
        )

    def _end(
        self,
        output: ChoiceOutput,
        row: RequestRow | None,
        content: str,
        tokens: list[int],
        probabilities: list[OutputProbability] | UnsetType = UNSET,
    ) -> LlamaCompletion:
        assert output.finished is not None
        request, prompt = self._sources[output.choice]
        reason, num_tokens = output.finished.reason, len(request.prompt_token_ids) + output.num_tokens
        wants_timings = self._body.eventlm is not None and bool(self._body.eventlm.timings)
        return self._part(
            output,
            content,
            tokens,
            probabilities=probabilities,
            model=self._model,
            generation_settings=generation_settings(request.sampling, self._body),
            prompt=prompt,
            has_new_line=output.choice in self._with_new_line,
            truncated=reason == "length" and num_tokens >= self._max_model_len,
            stop_type=_STOP_TYPES.get(reason, "eos"),
            stopping_word=output.stop_reason if reason == "stop" and isinstance(output.stop_reason, str) else "",
            tokens_cached=output.finished.cached_tokens,
            timings=UNSET if row is None else llama_timings(row),
            eventlm=timings({output.choice: row}) if wants_timings and row is not None else UNSET,
        )

    def _probabilities(self, output: ChoiceOutput) -> list[OutputProbability] | UnsetType:
        if output.delta is not None:
            return list(reported_probabilities(output.delta)) if output.delta.logprobs else UNSET
        return UNSET if output.logprobs is None else list(probabilities(self._tokenizer, output))

    def _selected(self, reply: LlamaCompletion) -> Any:
        """The fields of a reply that the body asks for; all if it names none."""
        names = self._body.response_fields
        if not names:
            return reply
        fields = msgspec.to_builtins(reply)
        found = {}
        for name in names:
            value: Any = fields
            for step in name.split("/"):
                value = value.get(step, UNSET) if isinstance(value, dict) else UNSET
            if value is not UNSET:
                found[name] = value
        return found


def probabilities(tokenizer: Tokenizer, output: ChoiceOutput) -> Iterator[OutputProbability]:
    """Those of an output that has log-probabilities."""
    assert output.logprobs is not None

    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": token_text(tokenizer, token_id),
            "bytes": list(tokenizer.raw_token_bytes(token_id)),
            "logprob": max(logprob, SMALLEST_LOGPROB),
        }

    logprobs = output.logprobs
    rows = zip(output.token_ids, logprobs.logprobs, logprobs.top_ids, logprobs.top_logprobs, strict=True)
    for token_id, logprob, top_ids, top_logprobs in rows:
        top = [TokenProbability(**fields(*pair)) for pair in zip(top_ids, top_logprobs, strict=True)]
        yield OutputProbability(**fields(token_id, logprob), top_logprobs=top)


def reported_probabilities(delta: AnswerDelta) -> Iterator[OutputProbability]:
    """Those that a backend has told, which has not told the ids of tokens: they are -1."""

    def fields(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
        data = list(entry.token.encode()) if entry.bytes is None else entry.bytes
        return {"id": -1, "token": entry.token, "bytes": data, "logprob": entry.logprob}

    for entry in reported_logprobs(delta):
        top = [TokenProbability(**fields(each)) for each in entry.top_logprobs]
        yield OutputProbability(**fields(entry), top_logprobs=top)


def llama_timings(row: RequestRow) -> LlamaTimings:
    """The timings of a sequence that has ended."""
    prompt_n = row.prompt_tokens - row.cached_tokens
    prompt_ms = (row.request_prefill_time or 0) / NANOSECONDS_PER_MILLISECOND
    predicted_ms = (row.request_decode_time or 0) / NANOSECONDS_PER_MILLISECOND
    return LlamaTimings(
        cache_n=row.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=1000 * _ratio(prompt_n, prompt_ms),
        predicted_n=row.output_tokens,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, row.output_tokens),
        predicted_per_second=1000 * _ratio(row.output_tokens, predicted_ms),
    )


def _ratio(number: float, by: float) -> float:
    return number / by if by else 0.0


class LlamaCompletions(Api[LlamaCompletionRequest]):
    """Continuations of prompts in llama.cpp's shapes."""

    prefix = "llama-"

    def decode(self, data: bytes) -> LlamaCompletionRequest:
        return decode_request(data, LlamaCompletionRequest, UNSUPPORTED)

    async def make_requests(
        self,
        context: ServerContext,
        body: LlamaCompletionRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        group = await completion_requests(context, body, received_ns, scheduling)
        group = within_limits(group, body.most_tokens, caller.principal.limits)
        # Replies have the prompts as the model sees them.
        return Prepared(group, [Echo(await _prompt_text(context, request), [], []) for request in group])

    def reply_format(
        self,
        context: ServerContext,
        body: LlamaCompletionRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return LlamaReplies(body, context, group, identity, echoes)


class _Prompted(Struct):
    """Of a forwarded completion."""

    prompt: str | list[int]


async def _prompt_text(context: ServerContext, request: Request) -> str:
    if request.forwarded is not None:
        prompt = msgspec.json.decode(request.forwarded.body, type=_Prompted).prompt
        if isinstance(prompt, str):
            return prompt
    return await context.requests.encoder.decode(request.prompt_token_ids)


LLAMA_COMPLETIONS = LlamaCompletions()


async def llama_completion(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts, in llama.cpp's shapes. Several have a list as their reply."""
    return await answer(request, LLAMA_COMPLETIONS)
