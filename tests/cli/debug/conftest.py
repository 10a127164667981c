"""One cache of indices for these tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's cache nor their history."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path / "state"))
