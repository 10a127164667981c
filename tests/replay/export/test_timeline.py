"""Counters are those of the metrics store; files are whole or not there."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Emitted, Finished, Forwarded
from eventlm.metrics.store import MetricsStore
from eventlm.replay.export.timeline import TimelineFormat, export_timeline
from eventlm.types import NANOSECONDS_PER_SECOND
from tests.replay.backend_runs import record_backends
from tests.replay.branch_runs import SEGMENT_BYTES, record_random, without_first_half
from tests.replay.explained_logs import read
from tests.replay.export.decoded_perfetto import Decoded
from tests.replay.golden import FOLDER
from tests.replay.index.runs import record_ranks
from tests.replay.traces import Objects, tampered

TIGHT = FOLDER / "edf_tight.jsonl"


@pytest.mark.parametrize("name", ["edf_tight", "lrs_dying_workers", "ranks"])
def test_counters_are_those_of_the_metrics_store_behind_each_drain(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.jsonl" if name != "ranks" else record_ranks(tmp_path)
    export_timeline(path, tmp_path / "run.pftrace", to="perfetto")
    counters = Decoded(tmp_path / "run.pftrace").counters
    store = MetricsStore()
    expected: dict[int, list[tuple[int, ...]]] = {}
    with LogReader(path) as reader:
        core = reader.header.core
        names = ["waiting", "running", "free blocks"]
        names += [f"free blocks, group {group}" for group in range(core.groups) if core.groups > 1]
        for line in reader:
            event = line.event()
            store.apply(event)
            expected[event.ts] = [
                (
                    each.num_waiting,
                    each.num_running,
                    core.blocks_per_replica - each.num_held_blocks,
                    *(core.num_blocks - num_held for num_held in each.group_held_blocks),
                )
                for each in store.gauges
            ]
    for replica, metrics in enumerate(store.snapshot().replicas):
        for index, counter in enumerate(names):
            values = dict(counters[f"replica {replica}/{counter}"])
            assert len(values) == len(counters[f"replica {replica}/{counter}"])
            now = -1
            for ns, gauges in expected.items():
                now = values.get(ns, now)
                assert now == gauges[replica][index], (replica, counter, ns)
        assert metrics.generation_tokens > 0
        # The last second is cut short, but no token is lost.
        for group, num_tokens in enumerate(metrics.group_tokens):
            values = dict(counters[f"replica {replica}/computed tokens/s, group {group}"])
            seconds = range(max(expected) // NANOSECONDS_PER_SECOND + 1)
            now, total = 0, 0
            for second in seconds:
                now = values.get(second * NANOSECONDS_PER_SECOND, now)
                total += now
            assert total == num_tokens > 0


def test_tokens_of_each_second(tmp_path: Path) -> None:
    factor = 40

    def slow_down(objects: Objects) -> None:
        """The same run in slow motion, so that it takes several seconds."""
        for item in objects:
            item["ts"] *= factor
            for key in ("start_ns", "end_ns"):
                if key in item:
                    item[key] *= factor

    path = tampered(FOLDER / "lrs_dying_workers.jsonl", tmp_path / "t", slow_down)
    export_timeline(path, tmp_path / "run.pftrace", to="perfetto")
    counters = Decoded(tmp_path / "run.pftrace").counters
    expected: dict[int, Counter[int]] = {}
    with LogReader(path) as reader:
        for line in reader:
            event = line.event()
            if isinstance(event, Emitted):
                expected.setdefault(event.replica, Counter())[event.ts // 1_000_000_000] += event.num_tokens
    assert max(map(len, expected.values())) > 2
    for index, seconds in expected.items():
        values = dict(counters[f"replica {index}/tokens/s"])
        assert len(values) == len(counters[f"replica {index}/tokens/s"])
        now = 0
        for second in range(max(seconds) + 1):
            now = values.get(second * 1_000_000_000, now)
            assert now == seconds[second]


def test_chrome_has_the_same_counters(tmp_path: Path) -> None:
    for to in ("perfetto", "chrome"):
        export_timeline(TIGHT, tmp_path / to, to=to)  # type: ignore[arg-type]
    found: dict[str, list[tuple[int, int]]] = {}
    for event in json.loads((tmp_path / "chrome").read_text())["traceEvents"]:
        if event["ph"] == "C":
            track = f"replica {event['pid'] - 2}/{event['name']}"
            found.setdefault(track, []).append((round(event["ts"] * 1000), event["args"][event["name"]]))
    assert found == Decoded(tmp_path / "perfetto").counters


def test_a_run_that_begins_in_the_middle_shows_what_was_live_there(tmp_path: Path) -> None:
    run = record_random(tmp_path / "runs", 5, segment_bytes=SEGMENT_BYTES)
    whole = export_timeline(run, tmp_path / "whole", to="perfetto")
    with LogReader(without_first_half(run)) as reader:
        first_ns = reader.header.ts
        num_ends = sum(isinstance(line.event(), Finished) for line in reader)
    rest = export_timeline(run, tmp_path / "rest", to="perfetto")
    assert num_ends == rest.num_sequences < whole.num_sequences
    for name, values in Decoded(tmp_path / "rest").counters.items():
        if "tokens" not in name:
            latest, expected = -1, []
            for ns, value in Decoded(tmp_path / "whole").counters[name]:
                latest = value if ns <= first_ns else latest
                expected += [(ns, value)] if ns > first_ns else []
            assert [(ns, value) for ns, value in values if ns > first_ns] == expected
            assert values[0] == (first_ns, latest)


@pytest.mark.parametrize("to", ["perfetto", "chrome"])
def test_a_trace_that_is_cut_short(to: TimelineFormat, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = TIGHT.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"t":"do')
    exported = export_timeline(trace, tmp_path / "out", to=to)
    assert any("torn" in warning or "cut short" in warning for warning in exported.warnings)
    if to == "perfetto":
        outcomes = {each.args.get("outcome") for each in Decoded(tmp_path / "out").slices}
        assert "unfinished" in outcomes


def test_damage_leaves_no_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(TIGHT.read_bytes().replace(b'"num_tokens":1,', b'"num_tokens":2,', 1))
    with pytest.raises(Exception, match="hash"):
        export_timeline(trace, tmp_path / "out", to="perfetto")
    assert list(tmp_path.iterdir()) == [trace]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a folder"):
        export_timeline(TIGHT, tmp_path, to="chrome")


@pytest.mark.parametrize("to", ["perfetto", "chrome"])
def test_other_servers_have_lanes_of_attempts(to: TimelineFormat, tmp_path: Path) -> None:
    path = record_backends(tmp_path, 9)
    export_timeline(path, tmp_path / "run", to=to)
    num_attempts = sum(isinstance(event, Forwarded) for event in read(path).events)
    if to == "perfetto":
        decoded = Decoded(tmp_path / "run")
        assert sum(", attempt" in each.name for each in decoded.slices) == num_attempts > 20
        assert {each.track[:7] for each in decoded.slices if ", attempt" in each.name} == {"backend"}
        assert not [name for name in decoded.counters if "free blocks" in name]
        return
    events = json.loads((tmp_path / "run").read_bytes())["traceEvents"]
    attempts = [event for event in events if event.get("cat") == "attempt"]
    assert len(attempts) == num_attempts
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in attempts:
        by_lane.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_lane.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(sorted(spans)))
