"""From sampling parameters as callers write them to those that a worker samples by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from eventlm.errors import InputError
from eventlm.sampling_params import SMALLEST_TEMPERATURE, SamplingParams


def check_known_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for the first token id that the model does not have."""
    check_token_ids(params.stop_token_ids or (), vocab_size, "stop_token_ids")
    check_token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    for token_id in params.logit_bias or ():
        if token_id >= vocab_size:
            raise _unknown_token(f"logit_bias.{token_id}", vocab_size)


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InputError for the first id in `param` that the model does not have."""
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise _unknown_token(f"{param}[{place}]", vocab_size)


def resolved(
    params: SamplingParams,
    *,
    vocab_size: int,
    bad_words_token_ids: tuple[tuple[int, ...], ...],
    grammar: str,
    **more: Any,
) -> SamplingParams:
    """The parameters with everything that depends on the model and its tokenizer, and `more` fields as given.

    `top_k` and the numbers of log-probabilities that mean the whole vocabulary, and temperatures that mean greedy, get
    their standard form.
    """
    return structs.replace(
        params,
        temperature=params.temperature if params.temperature >= SMALLEST_TEMPERATURE else 0.0,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        logprobs=_num_logprobs(params.logprobs, vocab_size),
        prompt_logprobs=_num_logprobs(params.prompt_logprobs, vocab_size),
        bad_words_token_ids=bad_words_token_ids,
        grammar=grammar,
        **more,
    )


def _num_logprobs(asked: int | None, vocab_size: int) -> int | None:
    if asked is None:
        return None
    return vocab_size if asked < 0 else min(asked, vocab_size)


def _unknown_token(param: str, vocab_size: int) -> InputError:
    return InputError(param, f"Invalid value for '{param}': token ids are from 0 to {vocab_size - 1}.")
