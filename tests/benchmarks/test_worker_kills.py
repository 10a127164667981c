"""Workers that die at random moments under load cost nobody anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.worker_kills import run

NUM_KILLS = 10
NUM_SOAKED_KILLS = 1000


async def test_nothing_is_lost_wrong_or_stuck_and_no_block_leaks(tmp_path: Path) -> None:
    report = await run(tmp_path, num_kills=NUM_KILLS)
    assert report.problems == []
    assert report.num_losses >= NUM_KILLS
    assert report.num_requests > NUM_KILLS


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_nor_in_many_more_losses(tmp_path: Path) -> None:
    report = await run(tmp_path, num_kills=NUM_SOAKED_KILLS, seed=2)
    assert report.problems == []
    assert report.num_losses >= NUM_SOAKED_KILLS
