"""The runs of the index's tests, and their cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.replay.debugger.session import Session
from tests.replay.branch_runs import record_random, record_with_gap, without_first_half
from tests.replay.golden import FOLDER
from tests.replay.index.conftest import all_runs, cache, random_runs, shared_cache

__all__ = ["all_runs", "cache", "random_runs", "shared_cache"]


@pytest.fixture
def session(cache: None) -> Iterator[Session]:
    """On a run with preemptions, samples, deadlines and text ends."""
    with Session.open(FOLDER / "edf_tight.jsonl") as opened:
        yield opened


@pytest.fixture(scope="session")
def lossy_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a gap, and one whose first half was not kept."""
    folder = tmp_path_factory.mktemp("lossy")
    with pytest.MonkeyPatch.context() as patch:
        with_gap = record_with_gap(folder / "gap", patch)
    return [with_gap, without_first_half(record_random(folder / "late", 5, segment_bytes=8192))]
