"""Turns the bytes of a backend's stream into what its answer goes on with, at little cost for each token."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from eventlm.client.chunks import DONE, Chunk, ChunkChoice, ChunkDelta, decode_chunk
from eventlm.client.sse import SseDecoder, TokenUsage
from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, BackendError, CallPart
from eventlm.gateway.counts import MOST, count_of
from eventlm.gateway.failures import from_event
from eventlm.types import FinishReason

_REASONS: dict[str, FinishReason] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
#: What vLLM and SGLang say of an answer that they gave up.
_GIVEN_UP = ("abort", "error")
#: Far above the longest that a server means: a whole tool call, or log-probabilities of many tokens.
_MAX_EVENT_BYTES = 16 * 2**20


class _Logprobs(Struct):
    """A chat's are in `content`, and llama.cpp's of completions too; the rest is of OpenAI's completions."""

    content: list[Raw] | None = None
    tokens: list[Raw] = []
    token_logprobs: list[Raw] = []
    top_logprobs: list[Raw] | None = None
    text_offset: list[Raw] = []


class _CompletionLogprobs(Struct):
    tokens: list[Raw]
    token_logprobs: list[Raw]
    top_logprobs: list[Raw] | None
    text_offset: list[Raw]


_decode_logprobs = msgspec.json.Decoder(_Logprobs).decode


class AnswerReader:
    """Reads one answer. Feed it with what came until it `is_over`, then take its `end`.

    num_chunks: events read so far. url, key: for messages, and to be kept out of them. has_token_chunks: each event has
    one token, so that they can be counted where the backend does not.
    """

    def __init__(self, url: str, *, key: str, has_token_chunks: bool = False) -> None:
        self.is_over = False
        self.num_chunks = 0
        #: What the stream failed with. What came before it is shown first.
        self._error: BackendError | None = None
        self._url, self._key = url, key
        self._has_token_chunks = has_token_chunks
        self._decoder = SseDecoder()
        self._num_tokens = 0
        self._reason = ""
        self._stop_reason: str | int | None = None
        self._usage: TokenUsage | None = None

    def feed(self, data: bytes) -> AnswerDelta | None:
        """Take bytes; what they bring, joined. None if that is nothing yet."""
        delta = self._read(self._decoder.feed(data))
        if self._decoder.num_pending > _MAX_EVENT_BYTES:
            line = f"{self._url} sent an event of more than {_MAX_EVENT_BYTES >> 20} MiB"
            self._fail(BackendError(line, "protocol"))
        return delta

    def finish(self) -> AnswerDelta | None:
        """The stream has ended; what it ended in without a blank line."""
        delta = self._read(self._decoder.end())
        self.is_over = True
        return delta

    def end(self) -> AnswerEnd:
        """How the answer ended. Raises BackendError if it is not whole."""
        if self._error is not None:
            raise self._error
        if not self._reason:
            raise BackendError(f"{self._url} ended its stream without a finish reason", "broken")
        if self._reason in _GIVEN_UP:
            raise BackendError(f"{self._url} gave the answer up ({self._reason})", "server")
        return AnswerEnd(_REASONS.get(self._reason, "stop"), _usage(self._usage), self._stop_reason)

    def _read(self, events: list[bytes]) -> AnswerDelta | None:
        parts = _Parts()
        num_before = self._num_tokens
        try:
            for event in events:
                if event == DONE:
                    self.is_over = True
                    break
                chunk = decode_chunk(event)
                if chunk.error is not None:
                    self._fail(from_event(self._url, chunk.error, key=self._key))
                    break
                self._take(chunk, parts)
                self.num_chunks += 1
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(BackendError(f"{self._url} sent an event that is no chunk: {error}", "protocol"))
        num_tokens = self._num_tokens - num_before
        return parts.delta(num_tokens) if num_tokens or parts else None

    def _fail(self, error: BackendError) -> None:
        self.is_over = True
        self._error = error

    def _take(self, chunk: Chunk, parts: _Parts) -> None:
        has_output = False
        for choice in chunk.choices or ():
            has_output |= parts.add(choice)
            if choice.finish_reason:
                self._reason = choice.finish_reason
                stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
                is_token = isinstance(stop, int) and 0 <= stop <= MOST
                self._stop_reason = stop if is_token or isinstance(stop, str) else None
        if chunk.usage is not None:
            self._usage = chunk.usage
            if chunk.choices and (num_tokens := count_of(chunk.usage.completion_tokens)) >= 0:
                # The backend counts all so far.
                self._num_tokens = max(self._num_tokens, num_tokens)
                return
        if has_output:
            num_ids = sum(len(choice.token_ids or ()) for choice in chunk.choices or ())
            self._num_tokens += num_ids or 1
            parts.is_counted &= bool(num_ids) or self._has_token_chunks


class _Parts:
    """What the chunks of one read bring."""

    __slots__ = ("calls", "is_counted", "logprobs", "reasoning", "text", "token_ids")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CallPart] = []
        self.token_ids: list[int] = []
        self.logprobs: list[_Logprobs] = []
        self.is_counted = True

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.token_ids or self.logprobs)

    def add(self, choice: ChunkChoice) -> bool:
        """Take what a choice has; whether there is any output in it. Raises msgspec.DecodeError."""
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.refusal
        has_output = bool(text)
        if text:
            self.text.append(text)
        if delta is not None:
            has_output |= self._add_rest(delta)
        if choice.token_ids:
            self.token_ids += choice.token_ids
            has_output = True
        # Not `null`.
        if len(choice.logprobs) > 4:
            self.logprobs.append(_decode_logprobs(choice.logprobs))
        return has_output

    def _add_rest(self, delta: ChunkDelta) -> bool:
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning:
            self.reasoning.append(reasoning)
        for position, part in enumerate(delta.tool_calls or ()):
            if part.function is not None:
                index = position if part.index is None else part.index
                self.calls.append(CallPart(index, part.function.name or "", part.function.arguments or ""))
        return bool(reasoning or delta.tool_calls)

    def delta(self, num_tokens: int) -> AnswerDelta:
        """All of it."""
        logprobs = _joined(self.logprobs) if self.logprobs else b""
        return AnswerDelta(
            "".join(self.text),
            num_tokens,
            "".join(self.reasoning),
            self.calls,
            self.token_ids,
            logprobs=logprobs,
            is_counted=self.is_counted,
        )


def _joined(found: list[_Logprobs]) -> bytes:
    content = [token for each in found for token in each.content or ()]
    if content:
        return msgspec.json.encode(content)
    tokens = [token for each in found for token in each.tokens]
    if not tokens:
        return b""
    values = [value for each in found for value in each.token_logprobs]
    offsets = [offset for each in found for offset in each.text_offset]
    top = [one for each in found for one in each.top_logprobs or ()]
    return msgspec.json.encode(_CompletionLogprobs(tokens, values, top or None, offsets))


def _usage(usage: TokenUsage | None) -> AnswerUsage:
    if usage is None:
        return AnswerUsage()
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    return AnswerUsage(
        count_of(usage.prompt_tokens),
        count_of(usage.completion_tokens),
        count_of(prompt.cached_tokens if prompt is not None else None),
        count_of(output.reasoning_tokens if output is not None else None),
    )
