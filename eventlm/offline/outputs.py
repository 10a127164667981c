"""The outputs of `LLM`, with vLLM's names and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, its rank by likelihood (from 1), and its text.

    A token of `logprob_token_ids` has no rank.
    """

    logprob: float
    rank: int | None
    decoded_token: str


#: Of one token: its own log-probability first, then those of the most likely ones that were asked for.
TokenLogprobDict = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `token_ids` includes the token that ended it, `text` does not. `logprobs` has one dict for each token, if asked for;
    `cumulative_logprob` is the sum of the tokens' own. `stop_reason` is the stop string or stop token that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobDict] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it is complete, which outputs of `LLM` always are."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request (`time.time()`): submitted, first token received, last token received."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions.

    `prompt` is None if the prompt was given as token ids. `prompt_logprobs` has one entry for each prompt token, if
    asked for; the first is None. `num_cached_tokens` of the prompt came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt: as many floats as the model is wide, of Euclidean length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many floats."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
