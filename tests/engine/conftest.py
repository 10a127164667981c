"""Every test here must leave no process and no folder behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import running_children


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that temporary folders are made in. Short, since a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = running_children()
        yield Path(folder)
        assert [pid for pid in running_children() if pid not in before] == []
        assert list(Path(folder).iterdir()) == []
