"""The limits of a request. The engine checks them at its entry for every caller: a request that passes can be recorded
in the trace, sent to a worker and computed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from msgspec import UNSET

from eventlm.config import CoreConfig
from eventlm.engine.request import (
    ContextLengthError,
    GroupSizeError,
    Request,
    RequestFieldError,
    Submission,
    TokenIdError,
)
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import RequestKind

#: Token ids are below this if the vocabulary's size is unknown. Workers and block hashes hold 32-bit integers.
TOKEN_ID_LIMIT = 1 << 31
#: Names of models, adapters and service classes have at most this many characters.
MAX_NAME_LENGTH = 256
#: Deadlines and objectives, in nanoseconds: 11.5 days.
MAX_DURATION_NS = 1_000_000_000_000_000


class Limits(NamedTuple):
    """The smallest and the largest value of a field, both included."""

    low: int
    high: int


_INT32 = Limits(0, (1 << 31) - 1)
#: JSON readers with 64-bit floats hold these exactly.
_ID = Limits(0, (1 << 53) - 1)
_TIME_NS = Limits(0, (1 << 62) - 1)
_DURATION_NS = Limits(0, MAX_DURATION_NS)

#: Integers of `SchedulingParams`.
SCHEDULING_LIMITS = {
    "priority": Limits(-(1 << 31), (1 << 31) - 1),
    "deadline_ns": _DURATION_NS,
    "slo_ttft_ns": _DURATION_NS,
    "slo_tpot_ns": _DURATION_NS,
    "session": _ID,
    "parent": _ID,
    "received_ns": _TIME_NS,
    "ready_ns": _TIME_NS,
    "front_end": _INT32,
}


def most_sequences(core: CoreConfig) -> int:
    """Sequences that an idle engine takes at once."""
    return core.max_queue_len + core.num_replicas * core.max_residents


def check_group(
    group: Sequence[Request], core: CoreConfig, *, vocab_size: int, submission: Submission | None = None
) -> None:
    """As `check_request` for each; also raises GroupSizeError for a group that not even an idle engine admits."""
    for request in group:
        check_request(request, max_model_len=core.max_model_len, vocab_size=vocab_size)
        if (request.forwarded is None) != (core.forwards is UNSET):
            raise RequestFieldError("forwarded", "given for a model that other servers run, and for no other")
    num_sequences = (submission and submission.search_sequences) or sum(request.n for request in group)
    most = most_sequences(core)
    # Waiting would not help.
    if num_sequences > most and not group[0].scheduling.offline:
        raise GroupSizeError(
            f"it asks for {num_sequences} sequences at once, and this server takes {most} at most "
            "(--max-queue-len, and --max-num-seqs of each replica); send fewer at a time"
        )


def check_request(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    """Raise ContextLengthError, TokenIdError or another InputError. `vocab_size`: 0 if unknown."""
    params = request.sampling
    params.check()
    _check_integers(request.scheduling, SCHEDULING_LIMITS)
    _check_choice("kind", request.scheduling.kind, get_args(RequestKind))
    for name in ("model", "adapter", "service_class", "asked_model"):
        _check_text(name, getattr(request.scheduling, name), MAX_NAME_LENGTH)
    _check_text("cache_salt", request.cache_salt)
    _check_text("grammar", params.grammar)
    if request.scheduling.waits_for_grammar and not params.grammar:
        raise RequestFieldError("waits_for_grammar", "false for a request without a grammar")
    if request.scheduling.kind == "generate" and not request.max_tokens:
        raise RequestFieldError("max_tokens", "at least 1 for a request that generates")
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens or num_tokens + request.max_tokens > max_model_len:
        raise ContextLengthError(
            f"{num_tokens} prompt tokens and {request.max_tokens} to produce do not fit the context of "
            f"{max_model_len} tokens"
        )
    _check_ids("the prompt", request.prompt_token_ids, vocab_size)
    # A model's own end tokens may be outside its vocabulary: then it cannot produce them.
    _check_ids("eos_token_ids", params.eos_token_ids, TOKEN_ID_LIMIT)
    for name, token_ids in _named_ids(params):
        _check_ids(name, token_ids, vocab_size)
    if not all(params.bad_words_token_ids):
        raise RequestFieldError("bad_words", "of at least one token each")


def _check_integers(params: SchedulingParams, limits: dict[str, Limits]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(params, name)
        # A bool is no number here.
        if type(value) is not int or not low <= value <= high:
            raise RequestFieldError(name, f"an integer from {low} to {high}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestFieldError(name, f"one of {', '.join(choices)}")


def _check_text(name: str, text: str, max_length: int | None = None) -> None:
    if max_length is not None and len(text) > max_length:
        raise RequestFieldError(name, f"of at most {max_length} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestFieldError(name, f"valid text, and has a lone surrogate at {error.start}") from error


def _named_ids(params: SamplingParams) -> Iterator[tuple[str, Iterable[int]]]:
    yield "logit_bias", params.logit_bias or ()
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "stop_token_ids", params.stop_token_ids or ()
    yield "logprob_token_ids", params.logprob_token_ids or ()
    for word in params.bad_words_token_ids:
        yield "bad_words", word


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    end = vocab_size or TOKEN_ID_LIMIT
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest >= 0 and largest < end:
        return
    wrong = smallest if smallest < 0 else largest
    raise TokenIdError(
        f"{name} has the token id {wrong}, which is out of vocabulary: the model's ids are from 0 to {end - 1}"
    )
