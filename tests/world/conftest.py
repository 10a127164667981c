from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_run_outlives_its_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """What its tests have kept of their worlds until now ends where nobody hears of it. In the middle of another test
    it would fill the log with tracebacks, which takes seconds.
    """
    yield
    if hasattr(request.module, "quiet"):
        with request.module.quiet():
            pass
