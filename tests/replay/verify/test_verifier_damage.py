"""Verification of traces that somebody meddled with: found where it was done, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import TraceCorruptError, TraceVersionError
from eventlm.events.codec import DECISION_TAGS, chain, close_line, encode_body
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.diff.diff import read_side
from eventlm.replay.explain.rank import rank
from eventlm.replay.export.tables import export
from eventlm.replay.verify.verifier import verify
from eventlm.replay.workload.recorded_run import read_run
from eventlm.system.system import real_system
from tests.bus.traces import header
from tests.replay.conftest import Recording
from tests.replay.traces import (
    CALM,
    Objects,
    another_block,
    divergence_of,
    indices,
    read_objects,
    small_machine,
    tampered,
    write_objects,
)
from tests.simulation import Simulation


def _applies(objects: Objects) -> Iterator[range]:
    """The indices of the decisions of each apply."""
    start = 1
    for index, item in enumerate(objects):
        if item["t"] not in DECISION_TAGS:
            if index > start:
                yield range(start, index)
            start = index + 1


def _two_kinds(objects: Objects) -> tuple[int, int]:
    """Neighbours of one apply, of different kinds."""
    return next(
        (index, index + 1)
        for run in _applies(objects)
        for index in run[:-1]
        if objects[index]["t"] != objects[index + 1]["t"]
    )


def _drop_in_the_middle(objects: Objects) -> int:
    index, _ = _two_kinds(objects)
    del objects[index]
    return index


def _drop_the_last(objects: Objects) -> int:
    index = next(run[-1] for run in _applies(objects) if objects[run[-1]]["t"] == "emit")
    del objects[index]
    return index


def _swap(objects: Objects) -> int:
    first, second = _two_kinds(objects)
    objects[first], objects[second] = objects[second], objects[first]
    return first


def _add_in_the_middle(objects: Objects) -> int:
    _, index = _two_kinds(objects)
    objects.insert(index, {"t": "finish", "s": 0, **_at(objects[index]), "request": 1, "index": 0, "reason": "length",
                           "position": 0})  # fmt: skip
    return index


def _add_at_the_end(objects: Objects) -> int:
    index = next(_applies(objects))[-1] + 1
    objects.insert(index, dict(objects[index - 1]))
    return index


def _at(event: dict[str, Any]) -> dict[str, Any]:
    return {"ts": event["ts"], "c": event["c"]}


def _another_digest(objects: Objects) -> int:
    index = indices(objects, "checkpoint")[0]
    objects[index]["digests"]["blocks"] = "0" * 16
    return index


def _another_count(objects: Objects) -> int:
    """A completion says that its first sampling row produced nothing; the emission behind it gives it away."""
    index = next(p for p in indices(objects, "done") if 1 in objects[p]["produced"])
    produced = objects[index]["produced"]
    produced[produced.index(1)] = 0
    return index + 1


def _another_step(objects: Objects) -> int:
    index = indices(objects, "done")[3]
    objects[index]["step"] += 1
    return index


def _no_completion(objects: Objects) -> int:
    index = indices(objects, "done")[0]
    del objects[index]
    return index


def _no_mark(objects: Objects) -> int:
    index = next(p for p in indices(objects, "done") if objects[p + 2]["t"] == "launch")
    del objects[index]["p"]
    return index + 2


def _another_time(objects: Objects) -> int:
    index = indices(objects, "arrive")[-1]
    objects[index]["ts"] = 1
    return index


@pytest.mark.parametrize(("change", "code", "exit_code"), [
    (_drop_in_the_middle, "extra_decision", 10),
    (_drop_the_last, "extra_decision", 10),
    (_swap, "reordered_decision", 10),
    (_add_in_the_middle, "missing_decision", 10),
    (_add_at_the_end, "missing_decision", 10),
    (another_block, "different_decision", 10),
    (_another_digest, "state_digest", 10),
    (_another_count, "different_decision", 10),
    (_no_completion, "missing_decision", 10),
    (_no_mark, "missing_decision", 10),
    (_another_step, "safety", 11),
    (_another_time, "safety", 11),
])  # fmt: skip
def test_meddling_is_found_where_it_was_done(
    fcfs_run: Recording, tmp_path: Path, change: Callable[[Objects], int], code: str, exit_code: int
) -> None:
    where: list[int] = []
    path = tampered(fcfs_run.path, tmp_path / "t", lambda objects: where.append(change(objects)))
    found = divergence_of(verify(path))
    assert (found.code, found.exit_code, found.s) == (code, exit_code, where[0])
    assert found.what


def test_a_changed_block_number_is_named(fcfs_run: Recording, tmp_path: Path) -> None:
    path = tampered(fcfs_run.path, tmp_path / "t", another_block)
    found = divergence_of(verify(path))
    assert len(found.fields) == 1
    assert found.fields[0].startswith("blocks[0]: recorded ")


def test_every_dropped_decision_is_found(fcfs_run: Recording, tmp_path: Path) -> None:
    checked = 0
    for index, item in enumerate(fcfs_run.objects):
        # The last of a trace cannot be told from a run that was killed before it; here an `end` follows.
        if item["t"] in DECISION_TAGS and index % 7 == 0:
            path = write_objects(tmp_path / "t", fcfs_run.objects[:index] + fcfs_run.objects[index + 1 :])
            # Where two alike stand side by side, the second is the one that is missed.
            assert index <= divergence_of(verify(path)).s <= index + 4
            checked += 1
    assert checked > 10


def test_flipped_bytes_of_a_recorded_run_are_refused(fcfs_run: Recording, tmp_path: Path) -> None:
    content = fcfs_run.path.read_bytes()
    path = tmp_path / "t"
    for at in range(0, len(content) - 1, 997):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises((TraceCorruptError, TraceVersionError), match=r"line|behaviour"):
            verify(path)


def _another_replica(objects: Objects) -> None:
    objects[indices(objects, "done")[3]]["replica"] = 9


def _a_row_more(objects: Objects) -> None:
    objects[indices(objects, "done")[3]]["produced"].append(1)


def _export(path: Path) -> object:
    return export(path, path.parent / "out", to="csv")


@pytest.mark.parametrize(
    ("read", "change", "behind"),
    [
        (trace_stats, _another_replica, 1),
        (lambda path: rank(path, 5), _another_replica, 1),
        (_export, _another_replica, 1),
        (read_side, _another_replica, 1),
        # The emission behind a completion is where its rows are counted.
        (read_run, _a_row_more, 2),
    ],
)
def test_sums_over_a_trace_report_where_it_contradicts_itself(
    fcfs_run: Recording,
    tmp_path: Path,
    read: Callable[[Path], object],
    change: Callable[[Objects], None],
    behind: int,
) -> None:
    path = tampered(fcfs_run.path, tmp_path / "t", change)
    line = indices(fcfs_run.objects, "done")[3] + behind
    with pytest.raises(TraceCorruptError, match=rf"damaged at line {line}, byte \d+: it contradicts"):
        read(path)
    assert not list(tmp_path.glob("out/*"))


def test_a_gap_ends_the_verification(fcfs_run: Recording, tmp_path: Path) -> None:
    gap = {"t": "gap", "s": 0, "ts": fcfs_run.objects[40]["ts"], "first": 40, "last": 44, "reason": "disk full"}
    found = divergence_of(verify(write_objects(tmp_path / "t", [*fcfs_run.objects[:40], gap])))
    assert (found.code, found.exit_code, found.s) == ("gap", 14, 40)
    assert "40 to 44" in found.what


def _first_with_blocks(state: dict[str, Any]) -> list[Any]:
    tables = [row[20] for request in state["requests"] for row in request[1]]
    return next(table for table in tables if table)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda state: _first_with_blocks(state).pop(),
        lambda state: _first_with_blocks(state).append(10**6),
        lambda state: state["replicas"][0]["pool"]["free"].clear(),
        lambda state: state["replicas"][0]["pool"]["free"].append(-1),
        lambda state: state["replicas"][0]["steps"][0][4].append(1),
        lambda state: state["requests"].pop(0),
        lambda state: state["predictor"].__setitem__(0, -1),
    ],
)
def test_a_segment_whose_snapshot_contradicts_itself_is_damaged(
    tmp_path: Path, meddle: Callable[[dict[str, Any]], None]
) -> None:
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=4000) as writer:
        Simulation(1, num_requests=16, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer).run()
    segment = sorted(writer.run_folder.glob("trace-*.jsonl"))[2]
    objects = read_objects(segment)
    assert objects[1]["t"] == "snapshot"
    assert verify(segment).exit_code == 0
    meddle(objects[1]["state"])
    h, lines = objects[0]["previous_h"], []
    for body in [msgspec.json.encode(event)[:-1] for event in objects]:
        h = chain(h, body)
        lines.append(close_line(body, h))
    segment.write_bytes(b"".join(lines))
    with pytest.raises(TraceCorruptError, match="damaged at line 2"):
        verify(segment)


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    objects = [msgspec.json.decode(encode_body(header(behaviour=99)) + b"}")]
    with pytest.raises(TraceVersionError, match="behaviour 99") as error:
        verify(write_objects(tmp_path / "t", objects))
    assert error.value.exit_code == 13
