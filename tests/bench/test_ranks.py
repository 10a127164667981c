"""One rank: everything is its own."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.bench.ranks import Ranks
from eventlm.errors import UsageError
from tests.bench.records import record, result


class Third(Ranks):
    rank = 2
    size = 4


def test_shares() -> None:
    assert [Ranks().share(number) for number in (0, 1, 7)] == [0, 1, 7]
    assert [Third().share(number) for number in (0, 2, 3, 6, 7, 11)] == [0, 0, 1, 1, 2, 3]


async def test_one_rank_does_everything() -> None:
    async def work() -> str:
        return "done"

    async def failing() -> str:
        raise UsageError("no")

    ranks = Ranks()
    assert await ranks.gathered(work(), str) == ["done"]
    assert await ranks.first(work, str) == "done"
    for work_of_it in (ranks.gathered(failing(), str), ranks.sharing_errors(failing()), ranks.first(failing, str)):
        with pytest.raises(UsageError, match="no"):
            await work_of_it
    async with ranks.numbers(total=3, max_concurrency=1, stop=asyncio.Event()) as next_number:
        assert next_number is None
    load = result(record(intended=0, tokens=[1]))
    assert ranks.merged(load) is load
    ranks.leave()
    ranks.abort()
    ranks.quit(130)
