"""Which GPUs this machine has decides none of these tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
