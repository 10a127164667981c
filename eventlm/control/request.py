"""What crosses the border between an edge (HTTP, command line) and the engine: requests in, outputs out.

An edge awaits `InferenceEngine.submit(group)` and then iterates over each `RequestHandle` until every sequence of the
request has a `FinishedOutput`. If the request has text ends, the edge owes exactly one `handle.text_ended(...)` for
each sequence: when it finds an end, else as its answer to `ClosingOutput`. A handle that is dropped must be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Union

from msgspec import Struct

from eventlm.errors import EventLMError, UsageError
from eventlm.sampler_params import SamplerParams, TokenLogprobs
from eventlm.types import FinishReason, RequestKind


class QueueFullError(EventLMError):
    """The queue has no room for the group; none of its requests was admitted."""


class ContextLengthError(EventLMError):
    """A prompt and its max_tokens exceed the context."""


class TokenIdError(UsageError):
    """A request names a token that the model does not have."""


class EngineUnavailableError(EventLMError):
    """The engine is loading, draining or dead."""


class EngineRequest(Struct, frozen=True, kw_only=True):
    """One prompt. `seed` None lets the engine draw one, which it records. Times are of `InferenceEngine.now_ns`.

    `stop` strings are found by the edge, in the text; the engine only needs to know `has_text_ends`. Neither does it
    look at the two fields that say what belongs into the text.
    """

    model: str
    prompt_token_ids: list[int]
    params: SamplerParams
    kind: RequestKind = "generate"
    n: int = 1
    seed: int | None = None
    skip_cache_read: bool = False
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    deadline_ns: int = 0
    slo_ttft_ns: int = 0
    slo_tpot_ns: int = 0
    service_class: str = ""
    session: int = 0
    parent: int = 0
    drop_if_late: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    has_text_ends: bool = False
    waits_for_grammar: bool = False
    offline: bool = False
    received_ns: int = 0
    ready_ns: int = 0
    front_end: int = 0


class TokensOutput(Struct, frozen=True):
    """New tokens of sequence `index`; their fact is in the trace. `start` is the place of the first in the output."""

    index: int
    start: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None


class PromptLogprobsOutput(Struct, frozen=True):
    """Log-probabilities of prompt tokens from place `start` on, as sequence `index` computed them.

    They come in the order of the prompt, but some may come again after a preemption.
    """

    index: int
    start: int
    logprobs: TokenLogprobs


class EmbeddingOutput(Struct, frozen=True):
    """The pooled embedding of the prompt, little-endian float32, as sequence `index` computed it."""

    index: int
    embedding: bytes


class ClosingOutput(Struct, frozen=True):
    """Sequence `index` ended at `position` output tokens; the edge owes its `text_ended` if it has not sent it."""

    index: int
    reason: FinishReason
    position: int


class FinishedOutput(Struct, frozen=True):
    """Sequence `index` is over. Only its first `position` tokens belong to the output."""

    index: int
    reason: FinishReason
    position: int
    cached_tokens: int


RequestOutput = Union[TokensOutput, PromptLogprobsOutput, EmbeddingOutput, ClosingOutput, FinishedOutput]  # noqa: UP007


class RequestHandle:
    """A live request as its edge sees it. Iterating ends after the last sequence's `FinishedOutput`.

    `request` is the arrival's seq. Iterating raises EngineUnavailableError if the engine dies first.
    """

    def __init__(
        self,
        request: int,
        n: int,
        text_ended: Callable[[int, int, int, str], None],
        cancel: Callable[[int, str], None],
    ) -> None:
        self.request = request
        self._unfinished = n
        self._text_ended = text_ended
        self._cancel = cancel
        self._outputs: asyncio.Queue[RequestOutput | EventLMError] = asyncio.Queue()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, EventLMError):
            self._unfinished = 0
            raise output
        if isinstance(output, FinishedOutput):
            self._unfinished -= 1
        return output

    def put(self, output: RequestOutput | EventLMError) -> None:
        """The engine's side: queue an output, or the error that ends the request."""
        self._outputs.put_nowait(output)

    def text_ended(self, index: int, position: int, reason: str = "") -> None:
        """Tell the engine that the text of sequence `index` ends at `position` tokens, or was looked at to there."""
        self._text_ended(self.request, index, position, reason)

    def cancel(self, reason: str = "client") -> None:
        """End the request; harmless when it has ended."""
        self._cancel(self.request, reason)
