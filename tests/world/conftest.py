from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_run_outlives_its_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let objects that a module's tests have kept of their worlds end here, with the log silenced. If that happened in
    another test, it would fill the log with tracebacks, which takes seconds.

    Meanwhile exempt what other modules have left from garbage collection. A run collects twice, and may otherwise spend
    ten times as long on their objects as on its own.
    """
    gc.collect()
    gc.freeze()
    yield
    if hasattr(request.module, "quiet"):
        with request.module.quiet():
            pass
