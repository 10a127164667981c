"""Runs that several modules verify."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.replay.traces import Objects, read_objects, record, small_machine


class Recording(NamedTuple):
    """A run and its events."""

    path: Path
    objects: Objects


@pytest.fixture(scope="module")
def fcfs_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = record(tmp_path_factory.mktemp("fcfs"), small_machine({"type": "fcfs"}))
    return Recording(path, read_objects(path))
