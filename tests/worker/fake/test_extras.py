from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from msgspec import structs

from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.worker.fake.extras import FAKE_EMBEDDING_SIZE, NUM_FAKE_TOKENS
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.fake.tokens import fake_token
from eventlm.worker.protocol import RowExtras
from tests.worker.launches import launched, new_sequence, payload

PROMPT = [5, 6, 2000, 7, 1023]


def run(sizes: list[int], *, num_decodes: int = 0, request: int = 1, kind: Any = "generate", **params: Any) -> Any:
    """(tokens, extras) of a prompt in chunks and of decodes behind it."""
    runner = FakeRunner({}, epoch=1, block_size=4, num_blocks=64)
    new = new_sequence(request, PROMPT, params=SamplingParams(seed=9, ignore_eos=True, **params))
    tokens: list[int] = []
    extras: list[RowExtras] = []
    start = 0
    for number, size in enumerate(sizes):
        samples = int(kind == "generate" and start + size == len(PROMPT))
        launch = launched(
            number, chunks=[(request, 0, start, size, samples)], blocks=[(0, 0, list(range(16)))] if not number else []
        )
        done = runner.execute(launch, payload(structs.replace(new, kind=kind)) if not number else payload())
        tokens += done.tokens[0]
        extras += done.extras
        start += size
    for step in range(num_decodes):
        launch = launched(100 + step, decodes=[(request, 0, len(PROMPT) + len(tokens), 0)])
        done = runner.execute(structs.replace(launch, most=[2]), payload())
        tokens += done.tokens[0]
        extras += done.extras
    return tokens, extras


def check(found: TokenLogprobs, token_ids: list[int], num_top: int) -> None:
    """Each token's entry is where its rank says, if it is listed at all."""
    assert len(found.logprobs) == len(found.ranks) == len(found.top_ids) == len(found.top_logprobs) == len(token_ids)
    for token, logprob, rank, ids, logprobs in zip(
        token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs, strict=True
    ):
        assert len(set(ids)) == len(ids) == len(logprobs) == num_top
        assert logprobs == sorted(logprobs, reverse=True)
        if rank <= num_top:
            assert (ids[rank - 1], logprobs[rank - 1]) == (token, logprob)
        else:
            assert token not in ids


def test_named_tokens_have_the_values_of_the_most_likely_ones() -> None:
    tokens, extras = run([5], num_decodes=9, logprobs=NUM_FAKE_TOKENS)
    named = [3, 500, *tokens[:2], 5 * NUM_FAKE_TOKENS]
    again, named_extras = run([5], num_decodes=9, logprob_token_ids=named)
    assert again == tokens
    for each, other in zip(extras, named_extras, strict=True):
        assert each.logprobs is not None
        assert other.logprobs is not None
        assert other.logprobs.logprobs == each.logprobs.logprobs
        assert other.logprobs.top_ids == [named] * len(each.logprobs.top_ids)
        rows = zip(each.logprobs.top_ids, each.logprobs.top_logprobs, strict=True)
        found = [dict(zip(ids, values, strict=True)) for ids, values in rows]
        assert other.logprobs.top_logprobs == [[row.get(token, -math.inf) for token in named] for row in found]


@pytest.mark.parametrize("num_top", [0, 1, 2, 20, NUM_FAKE_TOKENS])
def test_output(num_top: int) -> None:
    tokens, extras = run([5], num_decodes=20, logprobs=num_top)
    assert tokens == [fake_token(9, 0, position) for position in range(len(tokens))]
    parts = [beside.logprobs for beside in extras]
    index = 0
    for part in parts:
        assert part is not None
        check(part, tokens[index : index + len(part.logprobs)], num_top)
        index += len(part.logprobs)
    assert index == len(tokens)
    assert len({rank for part in parts if part is not None for rank in part.ranks}) > 2


def test_probabilities_of_all_tokens_add_up_to_one() -> None:
    _, [beside] = run([5], logprobs=-1)
    assert math.fsum(map(math.exp, beside.logprobs.top_logprobs[0])) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_prompt(kind: str) -> None:
    found = []
    for sizes in ([5], [2, 3], [4, 1]):
        _, extras = run(sizes, kind=kind, prompt_logprobs=3)
        rows = []
        for beside in extras:
            assert beside.prompt_start == 1 + len(rows)
            end = beside.prompt_start + len(beside.prompt_logprobs.logprobs)
            check(beside.prompt_logprobs, PROMPT[beside.prompt_start : end], 3)
            rows += list(zip(beside.prompt_logprobs.logprobs, beside.prompt_logprobs.top_ids, strict=True))
        found.append(rows)
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


def test_embedding() -> None:
    tokens, [beside] = run([2, 3], kind="pool")
    assert tokens == []
    values = struct.unpack(f"<{FAKE_EMBEDDING_SIZE}f", beside.embedding)
    assert len(set(values)) == FAKE_EMBEDDING_SIZE
    assert all(-1 <= value <= 1 for value in values)
    assert run([5], kind="pool", request=7)[1][0].embedding == beside.embedding


def test_nothing_unrequested_is_computed() -> None:
    assert run([2, 3], num_decodes=3)[1] == []
