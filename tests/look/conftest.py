"""The planted runs and their indices, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.planted import record_planted


@pytest.fixture(scope="session")
def planted_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a planted run, by its name."""
    folder = tmp_path_factory.mktemp("planted")
    return cache(lambda name: record_planted(folder, name))


@pytest.fixture(scope="session")
def look_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache_folder(look_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(look_cache))


@pytest.fixture
def planted_index(planted_run: Callable[[str], Path]) -> Callable[[str], Index]:
    """The index of a planted run, by its name."""
    return lambda name: open_index(planted_run(name), trust_local_plugins=True)
