from __future__ import annotations

import threading
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cannot run two, nor Python 3.11 parse two sources, and a test's ranks are threads."""
    lock, run = threading.Lock(), interpreter.InterpretedFunction.run

    def locked(*arguments: Any, **others: Any) -> None:
        with lock:
            run(*arguments, **others)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", locked)
