"""How completions are drawn and when they end, as callers of `LLM` say it: vLLM's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eventlm.offline.errors import InvalidInputError
from eventlm.offline.structured_outputs import StructuredOutputsParams
from eventlm.sampler_params import (
    LARGEST_LOGIT_BIAS,
    LARGEST_PENALTY,
    LARGEST_REPETITION_PENALTY,
    SMALLEST_REPETITION_PENALTY,
)

#: vLLM's bound, unless its environment says otherwise.
_LARGEST_N = 16_384


@dataclass
class SamplingParams:
    """Parameters of one or many prompts.

        SamplingParams(temperature=0, max_tokens=64)                greedy
        SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=1)    four completions, the same at every call

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 keep the whole vocabulary.
    `repetition_penalty` weighs tokens of prompt and output, `presence_penalty` and `frequency_penalty` those of the
    output. `seed` None or -1 draws another one for each request. `stop` strings end a completion before them, or behind
    them with `include_stop_str_in_output`; `stop_token_ids` end it too, and so does the model's end of sequence
    unless `ignore_eos`. `min_tokens` come before any of these. `max_tokens` None is as many as the context holds.
    `logprobs` and `prompt_logprobs` ask for the log-probability of each token and of that many of the most likely
    ones, -1 for the whole vocabulary. `bad_words` are never completed; of `allowed_token_ids`, if given, all tokens are
    drawn; `logit_bias` is added to the logits of its token ids. `skip_special_tokens` leaves them out of the text.
    `structured_outputs` says what the whole text must match; `guided_decoding` is its older name.

    Raises InvalidInputError that names the parameter.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = field(default_factory=list)
    stop_token_ids: list[int] | None = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Bring lists into form and raise InvalidInputError for a value out of its range.

        Done at construction and again at each use, for the fields may be assigned to.
        """
        self.stop = _items("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.stop_token_ids = _items("stop_token_ids", self.stop_token_ids)
        self.bad_words = _items("bad_words", self.bad_words)
        self.seed = None if self.seed == -1 else self.seed
        # As in vLLM, true asks for one.
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self._check_numbers()
        self._check_flags()
        _check_texts("stop", self.stop)
        _check_texts("bad_words", self.bad_words)
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidInputError("allowed_token_ids is empty: no token could be drawn; None allows all")
        self._check_logit_bias()
        self._check_structure()

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What the text must match, by whichever name it was asked for."""
        return self.structured_outputs or self.guided_decoding

    def _check_structure(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, StructuredOutputsParams):
                raise InvalidInputError(f"{name} must be a StructuredOutputsParams, got {value!r}")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise InvalidInputError("structured_outputs and guided_decoding are the same; give one of them")

    def _check_numbers(self) -> None:
        _check_integer("n", self.n, low=1, high=_LARGEST_N)
        _check_float("presence_penalty", self.presence_penalty, low=-LARGEST_PENALTY, high=LARGEST_PENALTY)
        _check_float("frequency_penalty", self.frequency_penalty, low=-LARGEST_PENALTY, high=LARGEST_PENALTY)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            low=SMALLEST_REPETITION_PENALTY,
            high=LARGEST_REPETITION_PENALTY,
        )
        _check_float("temperature", self.temperature, low=0.0, high=2.0)
        _check_float("top_p", self.top_p, above=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=-1)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInputError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )
        if self.n > 1 and self.temperature == 0:
            raise InvalidInputError(f"n is {self.n} at temperature 0: all completions would be the same")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), low=-1)

    def _check_flags(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise InvalidInputError(f"logit_bias must be a dict from token id to number, got {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            _check_integer("a key of logit_bias", token_id, low=0)
            _check_float(f"logit_bias[{token_id}]", bias, low=-LARGEST_LOGIT_BIAS, high=LARGEST_LOGIT_BIAS)


def _items(name: str, given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset):
        raise InvalidInputError(f"{name} must be a list, got {given!r}")
    try:
        # One that is named twice counts once.
        return list(dict.fromkeys(sorted(given) if isinstance(given, set | frozenset) else given))
    except TypeError:
        # There is one among them that none of these may be, which is said when each is checked.
        return list(given)


def _check_integer(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidInputError(f"{name} must be {wanted}, got {value}")


def _check_float(name: str, value: Any, *, low: float | None = None, above: float | None = None, high: float) -> None:
    """`low` is the least value that is allowed, `above` the greatest that is not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInputError(f"{name} must be a number, got {value!r}")
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if not math.isfinite(value) or too_low or value > high:
        least = f"above {above:g}" if above is not None else f"at least {low:g}"
        raise InvalidInputError(f"{name} must be a number {least} and at most {high:g}, got {value}")


def _check_texts(name: str, texts: Any) -> None:
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise InvalidInputError(f"{name}[{place}] must be a string that is not empty, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"{name}[{place}] is not valid text: it has a lone surrogate at {error.start}"
            ) from error


def _check_ids(name: str, token_ids: Any) -> None:
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
        raise InvalidInputError(f"{name} must be a list of token ids, got {token_ids!r}")
    for place, token_id in enumerate(token_ids):
        _check_integer(f"{name}[{place}]", token_id, low=0)
