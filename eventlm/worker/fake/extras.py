"""Log-probabilities and embeddings of the fake worker: hashes too, and consistent in themselves.

At every position the k-th most likely token has the probability 2^-k. A token's own rank is a hash of its position, and
the tokens of the other ranks follow from it, so that its entry is the same wherever it is listed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import msgspec
import xxhash

from eventlm.sampling_params import TokenLogprobs
from eventlm.worker.protocol import RowExtras
from eventlm.worker.sequence_table import Row

#: Tokens that have a probability: this many ids, those around the token itself.
NUM_FAKE_TOKENS = 1024
FAKE_EMBEDDING_SIZE = 16
_MAX_RANK = 4

#: A 64-bit hash.
Draw = Callable[..., int]


def fake_extras(number: int, row: Row, produced: list[int], draw: Draw) -> RowExtras | None:
    """What row `number` gives beside the tokens it produced; None if its request asked for nothing."""
    sequence = row.sequence
    if not sequence.wants_extras:
        return None
    params, logprobs, prompt_logprobs, embedding = sequence.params, None, None, b""
    if params.logprobs is not None and produced:
        indices = range(sequence.position, sequence.position + len(produced))
        wheres = [draw("rank", params.noise_seed, sequence.id.index, index) for index in indices]
        logprobs = _token_logprobs(produced, wheres, params.logprobs)
        if params.logprob_token_ids is not None:
            logprobs = _of_named(logprobs, produced, wheres, params.logprob_token_ids)
    num_top = 0 if params.prompt_logprobs is None and sequence.kind == "score" else params.prompt_logprobs
    start, end = row.start + 1, min(row.start + 1 + row.num_tokens, sequence.num_prompt_tokens)
    if num_top is not None and start < end:
        wheres = [draw("prompt", index, *sequence.token_ids[index - 1 : index + 1]) for index in range(start, end)]
        prompt_logprobs = _token_logprobs(sequence.token_ids[start:end], wheres, num_top)
    if sequence.kind == "pool" and row.start + row.num_tokens == sequence.num_prompt_tokens:
        embedding = _embedding(sequence.token_ids)
    if logprobs is None and prompt_logprobs is None and not embedding:
        return None
    return RowExtras(
        row=number,
        logprobs=logprobs,
        prompt_start=start if prompt_logprobs is not None else 0,
        prompt_logprobs=prompt_logprobs,
        embedding=embedding,
    )


def _token_logprobs(token_ids: list[int], wheres: list[int], num_top: int) -> TokenLogprobs:
    num_top = NUM_FAKE_TOKENS if num_top < 0 else min(num_top, NUM_FAKE_TOKENS)
    ranks = [1 + where % _MAX_RANK for where in wheres]
    top_ids = []
    for token, rank, where in zip(token_ids, ranks, wheres, strict=True):
        # Odd, so that it steps through all of them.
        step = where >> 8 | 1
        base, own = token - token % NUM_FAKE_TOKENS, token % NUM_FAKE_TOKENS
        top_ids.append([base + (own + step * (other - rank)) % NUM_FAKE_TOKENS for other in range(1, num_top + 1)])
    return TokenLogprobs(
        logprobs=[_logprob(rank) for rank in ranks],
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=[[_logprob(rank) for rank in range(1, num_top + 1)] for _ in token_ids],
    )


def _of_named(logprobs: TokenLogprobs, token_ids: list[int], wheres: list[int], named: list[int]) -> TokenLogprobs:
    """The same with the named tokens in place of the most likely ones: those of ids that have no probability too."""
    values = []
    for token, rank, where in zip(token_ids, logprobs.ranks, wheres, strict=True):
        base, own, step = token - token % NUM_FAKE_TOKENS, token % NUM_FAKE_TOKENS, where >> 8 | 1
        inverse = pow(step, -1, NUM_FAKE_TOKENS)
        # Rank r has the token own + step * (r - rank).
        ranks = [1 + (rank - 1 + (each - base - own) * inverse) % NUM_FAKE_TOKENS for each in named]
        values.append(
            [
                _logprob(rank) if base <= each < base + NUM_FAKE_TOKENS else -math.inf
                for each, rank in zip(named, ranks, strict=True)
            ]
        )
    return msgspec.structs.replace(logprobs, top_ids=[named for _ in token_ids], top_logprobs=values)


def _logprob(rank: int) -> float:
    return -rank * math.log(2)


def _embedding(token_ids: list[int]) -> bytes:
    """Numbers from -1 to 1, by the prompt alone."""
    content = struct.pack(f"<{len(token_ids)}q", *token_ids)
    values = [xxhash.xxh3_64_intdigest(content, seed=index) / 2**63 - 1 for index in range(FAKE_EMBEDDING_SIZE)]
    return struct.pack(f"<{FAKE_EMBEDDING_SIZE}f", *values)
