"""What the engine asks of a request whatever edge it comes from: what would break a worker never gets to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from eventlm.config import CoreConfig
from eventlm.engine.request import ContextLengthError, EngineRequest, GroupSizeError, TokenIdError
from eventlm.errors import UsageError
from eventlm.sampler_params import SamplerParams


def check_group(group: Sequence[EngineRequest], core: CoreConfig, *, vocab_size: int) -> None:
    """As `check_request` for each; also raises GroupSizeError for a group that not even an idle engine admits."""
    for request in group:
        check_request(request, max_model_len=core.max_model_len, vocab_size=vocab_size)
    num_sequences = sum(request.n for request in group)
    most = core.max_queue_len + core.num_replicas * core.max_num_seqs
    # To wait would not help.
    if num_sequences > most and not group[0].offline:
        raise GroupSizeError(
            f"it asks for {num_sequences} sequences at once, and this server takes {most} at most "
            "(--max-queue-len, and --max-num-seqs of each replica); send fewer at a time"
        )


def check_request(request: EngineRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise ContextLengthError, TokenIdError or UsageError. `vocab_size` 0: not known, then any id may exist."""
    if request.n < 1 or (request.kind == "generate" and request.params.max_tokens < 1):
        raise UsageError("a request asks for at least one sample (n) of at least one token (max_tokens)")
    _check_text("cache_salt", request.cache_salt)
    _check_text("adapter", request.adapter)
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens or num_tokens + request.params.max_tokens > max_model_len:
        raise ContextLengthError(
            f"{num_tokens} prompt tokens and {request.params.max_tokens} to produce do not fit the context of "
            f"{max_model_len} tokens"
        )
    _check_ids("the prompt", request.prompt_token_ids, vocab_size)
    for name, token_ids in _named_ids(request.params):
        _check_ids(name, token_ids, vocab_size)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid text: it has a lone surrogate at {error.start}") from error


def _named_ids(params: SamplerParams) -> Iterator[tuple[str, Iterable[int]]]:
    if params.logit_bias:
        yield "logit_bias", [token_id for token_id, _ in params.logit_bias]
    yield "allowed_token_ids", params.allowed_token_ids
    yield "stop_token_ids", params.stop_token_ids
    for word in params.bad_words:
        yield "bad_words", word


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest >= 0 and (largest < vocab_size or not vocab_size):
        return
    wrong = smallest if smallest < 0 else largest
    known = f"from 0 to {vocab_size - 1}" if vocab_size else "0 and above"
    raise TokenIdError(f"{name} has the token id {wrong}, which the model does not have: its ids are {known}")
