"""Lost workers and failing plug-ins."""

from __future__ import annotations

from pathlib import Path

from eventlm.look.findings.find import find_all
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER
from tests.replay.index.runs import record_ranks
from tests.replay.traces import read_objects, tampered


def test_lost_workers_are_found() -> None:
    findings = find_all(open_index(FOLDER / "lrs_dying_workers.jsonl"))
    (lost,) = [finding for finding in findings if finding.kind == "worker_lost"]
    assert lost.title == "3 workers lost"
    assert lost.culprit == "workers of replicas 0, 1"
    assert lost.s == 46


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    findings = find_all(open_index(record_ranks(tmp_path)))
    (lost,) = [finding for finding in findings if finding.kind == "worker_lost"]
    assert lost.culprit == "rank 0 of replica 1"
    assert lost.text.startswith("Most often: rank 0 of 9 (stage 0, KV group 0): ")


def test_a_dead_engine_is_found_once() -> None:
    index = open_index(FOLDER / "edf_recovered.jsonl")
    (found,) = [finding for finding in find_all(index) if finding.kind == "engine_down"]
    assert found.title == "The engine was down 2 times"
    assert "Most often: killed." in found.text
    down_ns = [item["down_ns"] for item in read_objects(FOLDER / "edf_recovered.jsonl") if item["t"] == "recovered"]
    assert found.figures == {"num_recoveries": 2, "down_ns": sum(down_ns)}


def test_a_failing_plugin_is_found(tmp_path: Path) -> None:
    def fail(objects: list[dict[str, object]]) -> None:
        place = next(number for number, item in enumerate(objects) if item["t"] == "launch")
        error = "policy mine:Policy: ZeroDivisionError"
        failure = {"t": "plugin_failed", "s": 0, "ts": objects[place]["ts"], "c": objects[place]["c"], "error": error}
        objects.insert(place, failure)

    # The log alone: a replay would not agree.
    path = tampered(FOLDER / "fcfs_one_replica.jsonl", tmp_path / "failing.jsonl", fail)
    (finding,) = [each for each in find_all(open_index(path, verify=False)) if each.kind == "plugin_failing"]
    assert finding.title == "A plug-in failed 1 time"
    assert finding.culprit == "policy mine:Policy: ZeroDivisionError"
    assert finding.figures == {"num_failures": 1}
