"""The runs of the index's tests, and their cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventlm.replay.debugger.session import Session
from tests.replay.golden import FOLDER
from tests.replay.index.conftest import all_runs, cache, random_runs, shared_cache

__all__ = ["all_runs", "cache", "random_runs", "shared_cache"]


@pytest.fixture
def session(cache: None) -> Iterator[Session]:
    """On a run with preemptions, samples, deadlines and text ends."""
    with Session.open(FOLDER / "edf_tight.jsonl") as opened:
        yield opened
