"""What all tests need: nothing of theirs ends up in the folders of whoever runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers record to a folder that goes with the tests."""
    before = os.environ.get("EVENTLM_STATE")
    os.environ["EVENTLM_STATE"] = str(tmp_path_factory.mktemp("state") / "runs")
    yield
    os.environ.pop("EVENTLM_STATE")
    if before is not None:
        os.environ["EVENTLM_STATE"] = before
