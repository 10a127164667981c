"""The runs, recorded once for a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay.index.runs import GOLDEN_RUNS, record_runs


@pytest.fixture(scope="session")
def random_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of random runs; some have many segments."""
    return record_runs(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def all_runs(random_runs: list[Path]) -> list[Path]:
    """The golden runs and the random ones."""
    return [*GOLDEN_RUNS, *random_runs]


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests, so that a run is indexed once."""
    monkeypatch.setenv("EVENTLM_HOME", str(shared_cache))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: None) -> None:
    """A cache of a test's own."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "cache"))
