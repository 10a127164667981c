"""Making an index: snapshots near every event, from the log alone, and while the run is being written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.replay.index import indexer
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import RunIndexer, open_index
from eventlm.replay.rebuild import rebuild
from tests.replay.index.runs import GOLDEN_RUNS, assert_same


def test_snapshots_are_near_every_event(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 30)
    index = open_index(GOLDEN_RUNS[0])
    starts = [0, *(each.next_s for each in index.snapshots), index.facts.next_s]
    assert len(starts) > 5
    assert max(np.diff(starts)) < 60


def test_from_the_log_alone_it_says_what_is_missing(all_runs: list[Path]) -> None:
    for path in all_runs:
        verified, alone = open_index(path), open_index(path, verify=False)
        assert "not verified" in alone.facts.missing
        for name in ("requests", "phases", "stretches", "steps", "marks"):
            for column in verified.tables[name].schema.columns:
                if column.startswith("best_hit"):
                    continue
                assert verified.tables[name][column].tolist() == alone.tables[name][column].tolist(), (name, column)
        assert verified.drains["s"].tolist() == alone.drains["s"].tolist()
        for column in ("running", "held"):
            for replica in range(alone.header.core.num_replicas):
                ours = verified.gauge_by_drain(column, replica)
                assert np.array_equal(ours, alone.gauge_by_drain(column, replica)), (path, column)
        assert (alone.gauges["free"] == -1).all()


def test_it_follows_a_run_that_is_being_written(random_runs: list[Path], tmp_path: Path) -> None:
    source = random_runs[1]
    content = (source / "trace.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(content[:150]))
    with LogReader(path) as reader:
        run = RunIndexer(str(path), reader.header, rebuild(reader.header))
    assert run.read_on()
    first = run.content()
    assert first.facts.next_s == 150
    assert not run.read_on()
    with path.open("ab") as file:
        file.write(b"".join(content[150:300]) + content[300][:20])
    assert run.read_on()
    assert run.content().facts.next_s == 300
    with path.open("ab") as file:
        file.write(content[300][20:] + b"".join(content[301:]))
    assert run.read_on()
    whole = open_index(source)
    with LogReader(path) as reader:
        assert_same(whole, Index(str(path), reader.header, run.content(), rebuild(reader.header)))


def test_the_best_hit_is_the_most_that_a_cache_holds(all_runs: list[Path]) -> None:
    num_hits = num_better_elsewhere = 0
    for path in all_runs:
        requests = open_index(path).requests
        best, cached = requests["best_hit_tokens"], requests["cached_tokens"]
        assert (best <= requests["prompt_tokens"]).all()
        num_hits += int((best > 0).sum())
        num_better_elsewhere += int(((best > cached) & (requests["best_hit_replica"] != requests["replica"])).sum())
    assert num_hits > 50
    assert num_better_elsewhere > 5
