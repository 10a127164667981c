"""The loads of the re-execution benchmark: as much work as is asked for, the same each time, and possible."""

from __future__ import annotations

import pytest

from benchmarks.reexecution import CONTROL, LOADS, MAX_MODEL_LEN, Load, requests

BLOCK_SIZE = 16
VOCAB_SIZE = 1000


@pytest.mark.parametrize("load", [*LOADS, CONTROL], ids=lambda load: load.name)
@pytest.mark.parametrize("num_tokens", [100, 20_000])
def test_requests_give_the_tokens_that_were_asked_for_and_fit(load: Load, num_tokens: int) -> None:
    made = list(requests(load, num_tokens, VOCAB_SIZE))
    assert sum(request.sampling.max_tokens * request.n for request in made) >= num_tokens
    assert all(request.sampling.ignore_eos for request in made)
    longest = min(MAX_MODEL_LEN, (load.num_blocks - 1) * BLOCK_SIZE)
    assert max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in made) <= longest
    assert made == list(requests(load, num_tokens, VOCAB_SIZE))
    # Enough at once for the batch that the load is about.
    if num_tokens == 20_000:
        assert len(made) * load.n >= 2 * load.max_num_seqs


def test_the_loads_share_all_of_the_tokens() -> None:
    assert sum(load.share for load in LOADS) == pytest.approx(1)
    assert len({load.name for load in LOADS}) == len(LOADS)
