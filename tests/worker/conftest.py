from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.reference import Pair, Schedule


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing by a second thread, and wait for it where the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture
def schedule(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedule]:
    """Of the runner of a module's `pair`."""
    schedule = Schedule(pair.runner, monkeypatch)
    yield schedule
    schedule.forget_all()
