from __future__ import annotations

import threading
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cannot run two, and a test's ranks are threads."""
    lock, call = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(*arguments: Any, **others: Any) -> None:
        with lock:
            call(*arguments, **others)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)
