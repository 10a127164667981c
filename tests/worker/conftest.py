from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.reference import Pair, Schedule


@pytest.fixture
def schedule(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """Of the runner of a module's `pair`."""
    schedule = Schedule(pair.runner, monkeypatch)
    yield schedule
    schedule.forget_all()
