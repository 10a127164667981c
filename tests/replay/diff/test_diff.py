"""Two runs beside each other: the same told otherwise, one decision changed, another policy, a cut run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.replay.diff.diff import METRICS, TraceDiff, diff, read_side
from tests.replay.backend_runs import backends_of, record_backends
from tests.replay.golden import BROKEN, FOLDER
from tests.replay.traces import Objects, indices, read_objects, record, small_machine, tampered, write_objects
from tests.replay.workload_runs import record as record_random

GOLDEN = FOLDER / "fcfs_one_replica.jsonl"


def compare(a: Path, b: Path) -> TraceDiff:
    return diff(read_side(a), read_side(b))


def told_otherwise(objects: Objects, *, later_ns: int = 0) -> Objects:
    """The same run with a note at its beginning: all positions, and with them all requests, are others. So are the
    names of blocks and the numbers of the pool's."""

    def moved(s: int) -> int:
        return s + 1 if s else 0

    found: Objects = [objects[0], {"t": "mark", "s": 1, "text": "note"}]
    for event in objects[1:]:
        event = dict(event) | {"ts": event.get("ts", 0) + later_ns}
        if "c" in event:
            event["c"] = moved(event["c"])
        if "request" in event:
            event["request"] = moved(event["request"])
        for name in ("decodes", "chunks", "forget"):
            if name in event:
                event[name] = [[moved(row[0]), *row[1:]] for row in event[name]]
        if "by" in event:
            event["by"] = [moved(event["by"][0]), event["by"][1]]
        if event["t"] == "arrive":
            event["blocks"] = [block + 1000 for block in event.get("blocks", [])]
        if event["t"] == "launch":
            event["blocks"] = [[row, index, [99 - b for b in blocks]] for row, index, blocks in event.get("blocks", [])]
        found.append(event)
    return found


@pytest.mark.parametrize("name", ["fcfs_one_replica", "edf_tight", "lrs_dying_workers"])
def test_a_run_equals_itself_in_another_encoding(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.jsonl"
    other = write_objects(tmp_path / "t", told_otherwise(read_objects(golden)))
    assert compare(golden, golden).is_identical
    found = compare(golden, other)
    assert found.is_identical, found.first
    assert found.header == []
    assert found.num_pairs == golden.read_text().count('"t":"arrive"')
    later = write_objects(tmp_path / "later", told_otherwise(read_objects(golden), later_ns=5_000))
    assert compare(golden, later).is_same


def test_random_workloads_with_chaos_are_the_same_as_themselves(tmp_path: Path) -> None:
    for seed in (5, 17):
        record_random(tmp_path, seed)
        found = compare(tmp_path / f"seed-{seed}", tmp_path / f"seed-{seed}")
        assert found.is_identical
        assert found.num_pairs > 0


def test_which_blocks_of_the_pool_are_taken_is_no_difference() -> None:
    assert compare(GOLDEN, FOLDER / f"{BROKEN}.jsonl").is_identical


def change_chunk(objects: Objects) -> int:
    """Let the first chunk of several tokens be shorter; its launch."""
    for index in indices(objects, "launch"):
        for chunk in objects[index].get("chunks", []):
            if chunk[3] > 1 and index > 40:
                chunk[3] -= 1
                return index
    raise AssertionError


def drop_row(objects: Objects) -> int:
    index = next(p for p in indices(objects, "launch")[12:] if objects[p].get("decodes") and "blocks" not in objects[p])
    del objects[index]["decodes"][-1]
    return index


def change_reason(objects: Objects) -> int:
    index = indices(objects, "finish")[2]
    objects[index]["reason"] = "cancelled"
    return index


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (change_chunk, "A computes prompt token"),
        (drop_row, "B does not"),
        (change_reason, "(cancelled, "),
    ],
)
def test_one_decision_that_was_changed_is_the_first_difference(
    change: Callable[[Objects], int], sentence: str, tmp_path: Path
) -> None:
    objects = read_objects(GOLDEN)
    index = change(objects)
    # Later ones do not matter.
    objects[indices(objects, "launch")[-1]]["most"] = [7]
    found = compare(GOLDEN, write_objects(tmp_path / "t", told_otherwise(objects)))
    assert found.first is not None
    assert not found.is_same
    assert sentence in found.first.what
    assert found.first.a.decision is not None
    assert found.first.b.decision is not None
    assert (found.first.a.decision["s"], found.first.b.decision["s"]) == (index, index + 1)
    assert found.first.a.cause.startswith('{"t":"')
    assert found.first.a.after_ns == found.first.b.after_ns


def test_a_run_whose_first_segments_are_gone_is_the_same_as_itself(tmp_path: Path) -> None:
    record_random(tmp_path, 5)
    run = tmp_path / "seed-5"
    whole = read_side(run)
    first, second, *_ = sorted(run.glob("trace-*.jsonl"))
    first.unlink()
    assert second.exists()
    found = compare(run, run)
    assert found.is_identical, found.first
    assert "earlier events were not kept" in found.a.warnings[0]
    assert 0 < found.num_pairs < len(whole.arrivals)


def test_another_policy_and_another_limit(tmp_path: Path) -> None:
    a = record(tmp_path, small_machine({"type": "fcfs"}), num_requests=40, run="a")
    b = record(tmp_path, small_machine({"type": "edf"}, max_num_seqs=4), num_requests=40, run="b")
    found = compare(a, b)
    assert found.num_pairs >= 40
    assert (found.only_a, found.only_b) == ([], [])
    names = [field.name for field in found.header]
    assert "policy" in names
    assert "core.max_num_seqs" in names
    assert found.first is not None
    assert "replica 0" in found.first.what
    assert {metric.metric for metric in found.metrics} == set(METRICS)
    for metric in found.metrics:
        assert metric.a.count == metric.b.count == metric.delta.count > 0
        assert metric.delta.mean == pytest.approx(metric.b.mean - metric.a.mean)
    largest = found.largest("e2e", 5)
    changes = [abs(sequence.delta("e2e") or 0) for sequence in largest]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] == max(abs(sequence.delta("e2e") or 0) for sequence in found.sequences)
    assert all(sequence.a.prompt_tokens == sequence.b.prompt_tokens for sequence in found.sequences)


def test_one_that_ends_early(tmp_path: Path) -> None:
    objects = read_objects(GOLDEN)
    cut = write_objects(tmp_path / "cut", objects[: len(objects) * 2 // 3])
    found = compare(GOLDEN, cut)
    assert found.first is not None
    assert found.first.b.decision is None
    assert "B has no such decision" in found.first.what
    assert found.first.a.decision is not None
    # Nothing before it is missing.
    assert found.first.a.decision["s"] >= len(objects) * 2 // 3
    assert found.num_uncompared or found.only_a
    assert "no clean end" in " ".join(found.b.warnings)


def test_another_host_is_reported_and_is_no_difference(tmp_path: Path) -> None:
    def change(objects: Objects) -> None:
        objects[0]["host"] = {"cpu": "other", "threads": 4}
        objects[0]["run"] = "another"

    found = compare(GOLDEN, tampered(GOLDEN, tmp_path / "t", change))
    assert [(field.name, field.a, field.b) for field in found.header] == [
        ("host.cpu", None, "other"),
        ("host.threads", None, 4),
    ]
    assert found.is_identical


def test_runs_of_other_servers(tmp_path: Path) -> None:
    path = record_backends(tmp_path, 9)
    same = compare(path, path)
    assert same.first is None
    machine = backends_of(9)
    slower = machine._replace(backends=machine.backends._replace(decode_ns=3_000_000, fails=0.5))
    other = compare(path, record_backends(tmp_path / "other", 9, machine=slower))
    assert other.first is not None
