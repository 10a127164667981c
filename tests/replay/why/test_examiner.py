"""What is said of every sequence after every drain is what an explanation says of the time that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from eventlm.bus.log_reader import LogLine
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import TRACE_NAME
from eventlm.core.state.step_plan import WaitCause
from eventlm.errors import UsageError
from eventlm.events import Closing, Event, Finished, Launched
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.result import Interval
from eventlm.replay.explain.timeline import rows_of
from eventlm.replay.index import indexer
from eventlm.replay.index.open import open_index
from eventlm.replay.why.examiner import Examiner
from eventlm.system.clock import SystemClock
from eventlm.system.system import real_system
from eventlm.types import SequenceId
from tests.bus.slow_disk import SlowDisk
from tests.replay.backend_runs import record_backends
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.why.positions import Positions, positions
from tests.simulation import Simulation

WAIT_CAUSES = get_args(WaitCause)
SELDOM = ("batcher", "trial", "micro_batch")
OF_BACKENDS = ("avoided", "backend_limit", "backend", "backoff")


def explained(path: Path, requests: list[int]) -> dict[SequenceId, list[Interval]]:
    found = explain(path, [(request, None) for request in requests]).explanations
    return {SequenceId(each.request, each.index): each.intervals for each in found}


def check_agreement(path: Path, at: Positions, counts: Counter[str]) -> None:
    """After every drain, of every live sequence."""
    intervals = explained(path, sorted({each.request for drain in at.drains for each in drain.live}))
    for drain in at.drains:
        for identity in drain.live:
            found = at.examiner.why(drain.last_s, *identity)
            now = [each for each in intervals[identity] if each.start_ns <= drain.ts < each.end_ns]
            if not now or now[0].phase == "unseen":
                # The log ends, or the sequence, before any time passes; or a gap begins.
                continue
            (interval,) = now
            told = (interval.cause, interval.replica) if interval.cause in WAIT_CAUSES else None
            where = f"{path.name}, {identity} after {drain.last_s}: {interval}"
            if found.cause is None:
                assert told is None, where
                assert found.steps or found.is_forwarded, where
                counts["in a step"] += 1
                continue
            if found.cause == "draining":
                assert told is not None, where
                assert interval.cause == "draining", where
            else:
                assert (found.cause, found.replica) == told, where
                assert interval.other == found.other
                assert interval.num_lacking >= found.num_lacking
            counts[found.cause] += 1
            (decisive,) = [each for each in found.constraints if each.decides]
            assert (decisive.name, decisive.verdict) == (found.cause, "stops"), where


def test_it_agrees_with_explain_at_every_drain_of_the_golden_traces() -> None:
    counts: Counter[str] = Counter()
    for name in GOLDEN:
        path = FOLDER / f"{name}.jsonl"
        with positions(path, every=2) as at:
            check_agreement(path, at, counts)
    assert counts["in a step"] > 1000
    assert all(counts[cause] > 10 for cause in WAIT_CAUSES if cause not in (*SELDOM, *OF_BACKENDS)), counts


def test_it_agrees_with_explain_on_other_servers(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in (0, 3, 18):
        path = record_backends(tmp_path, seed)
        with positions(path, every=7) as at:
            check_agreement(path, at, counts)
    assert counts["in a step"] > 100
    assert all(counts[cause] for cause in ("backend_limit", "backend", "backoff")), counts


@pytest.mark.parametrize("every", [2, 40])
def test_it_agrees_where_a_log_has_segments_and_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    disk = SlowDisk(monkeypatch)
    clock = [1000.0]
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: int(clock[0] * 1e9))
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=16384) as writer:
        simulation = Simulation(5, num_requests=10, writer=writer, check_every=0)

        def fill_disk(event: Event) -> None:
            """For sixty events."""
            if event.s in (150, 210):
                disk.num_full = (1 << 30) * (event.s == 150)
                clock[0] += 100

        simulation.engine_core.bus.attach(fill_disk)
        simulation.run()
    counts: Counter[str] = Counter()
    with positions(writer.run_folder, every=every) as at:
        check_agreement(writer.run_folder, at, counts)
        assert at.reader.gaps
        assert at.reader.num_segments > 1
    assert sum(counts.values()) > 100


def test_a_later_segment_is_asked_alone(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=8192) as writer:
        Simulation(5, num_requests=10, writer=writer, check_every=0).run()
    counts: Counter[str] = Counter()
    path = writer.run_folder / TRACE_NAME
    with positions(path, every=10_000) as at:
        assert at.reader.header.s > 0
        check_agreement(path, at, counts)
        early = next(iter(at.reader.lines_from(0))).s - 1
        with pytest.raises(UsageError, match=f"request {early} is not live here"):
            at.examiner.why(at.drains[0].last_s, early)
    assert counts


@contextmanager
def golden(name: str = "edf_tight", *, every: int = 4) -> Iterator[Positions]:
    with positions(FOLDER / f"{name}.jsonl", every=every) as at:
        yield at


def test_an_index_has_the_cores_to_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 40)
    index = open_index(FOLDER / "edf_tight.jsonl")
    assert len(index.snapshots) > 2
    assert index.rebuilt is not None
    with golden(every=10_000) as at:
        examiner = Examiner(at.reader, index.rebuilt, index.nearest_core)
        for drain in at.drains[::7]:
            for identity in drain.live:
                assert examiner.why(drain.last_s, *identity) == at.examiner.why(drain.last_s, *identity)


def test_a_position_inside_a_drain_is_that_of_the_drain_before() -> None:
    with golden() as at:
        by_tag: dict[str, list[LogLine]] = {}
        for line in at.reader:
            by_tag.setdefault(line.tag, []).append(line)
        launch = by_tag["launch"][8]
        drain = next(drain for drain in at.drains if drain.last_s >= launch.s)
        # The decision belongs to its drain, whose last event comes later or is itself.
        assert at.examiner.plan(launch.s).state.now_ns == drain.ts
        (before,) = [each for each in at.drains if each.last_s < launch.event().c][-1:]
        unmarked = next(line for line in by_tag["arrive"] if not line.event().p)  # type: ignore[attr-defined]
        state = at.examiner.plan(unmarked.s).state
        assert state.next_seq <= unmarked.s
        assert before.ts < drain.ts


def test_one_clear_line_for_what_is_no_live_request() -> None:
    with golden() as at:
        tags = {line.s: line.tag for line in at.reader}
        end = next(line for line in at.reader if line.tag == "finish").event()
        assert isinstance(end, Finished)
        last = at.drains[-1].last_s
        launch = next(s for s, tag in tags.items() if tag == "launch")
        late = max(s for s, tag in tags.items() if tag == "arrive")
        for s, request, index, message in (
            (last, end.request, 0, f"request {end.request} is not live here: it has ended"),
            (last, launch, 0, f"event {launch} is not a request but `launch`"),
            (late - 1, late, 0, f"request {late} has not arrived"),
            (last, 10**6, 0, "request 1000000 has not arrived"),
            (at.drains[1].last_s, at.drains[1].live[0].request, 7, "no sample 7"),
        ):
            with pytest.raises(UsageError, match=message):
                at.examiner.why(s, request, index)


def test_the_next_step_is_that_of_the_log_and_names_who_left_for_it() -> None:
    num_departed = 0
    with golden() as at:
        launches = [line.event() for line in at.reader if line.tag == "launch"]
        ends = {
            (event.request, event.index): event.s
            for line in at.reader
            if line.tag in ("finish", "closing") and isinstance(event := line.event(), Finished | Closing)
        }
        for drain in at.drains[::5]:
            for identity in drain.live:
                found = at.examiner.next_step(drain.last_s, *identity)
                rows = [
                    event
                    for event in launches
                    if isinstance(event, Launched) and event.s > drain.last_s and identity in rows_of(event)
                ]
                if not rows:
                    assert found is not None
                    assert found.ended
                    continue
                assert found is not None
                assert found.ended or (found.s, found.step, found.replica) == (rows[0].s, rows[0].step, 0)
                assert not found.ended or found.s < rows[0].s
                assert found.first_s <= found.fact_s == rows[0].c or found.ended
                num_departed += sum((departure.num_blocks or 0) > 0 for departure in found.departures)
        assert ends
        assert num_departed > 5
        assert at.examiner.next_step(at.drains[2].last_s, *at.drains[2].live[-1], max_lines=1) is None
        # Nobody asks for one that never comes again.
        assert at.examiner.next_step(at.drains[-1].last_s, *at.drains[2].live[-1]) is None
