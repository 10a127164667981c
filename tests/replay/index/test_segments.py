"""Indices by several processes are those by one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eventlm.replay.index import open as opening
from eventlm.replay.index.cache import index_folder
from eventlm.replay.index.open import open_index
from eventlm.replay.index.segments import index_segments
from tests.replay.index.runs import GOLDEN_RUNS, assert_same, refuse


def test_segments_by_several_processes_give_the_same(
    random_runs: list[Path], own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {path: len(list(path.glob("trace*.jsonl"))) for path in random_runs}
    path = min((path for path in random_runs if counts[path] > 3), key=counts.__getitem__)
    with monkeypatch.context() as patched:
        patched.setattr(opening, "RunIndexer", refuse)
        parallel = open_index(path, num_jobs=2)
    shutil.rmtree(index_folder())
    alone = open_index(path, num_jobs=1)
    assert parallel.facts == alone.facts
    assert_same(alone, parallel)
    assert len(parallel.snapshots) > len(alone.snapshots)
    for drain in range(0, len(alone.drains), 7):
        next_s = alone.drains.row(drain)["next_s"]
        assert parallel.core_at(next_s).digests() == alone.core_at(next_s).digests()


def test_files_of_different_runs_are_not_joined() -> None:
    assert index_segments(GOLDEN_RUNS[:2], num_jobs=1, trust_local_plugins=False) is None
