"""What the real trace writer leaves on a failing disk, and what the reader reports."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.run_folder import LATEST_NAME
from eventlm.errors import ExitCode, TraceCorruptError, UsageError
from eventlm.events import Event
from eventlm.events.codec import encode_body
from eventlm.system.clock import SystemClock
from eventlm.system.disk import Disk
from eventlm.system.system import System, real_system
from tests.bus import traces
from tests.bus.crashes import Killed
from tests.bus.noted_run import NotedRun
from tests.world.machine.disk import WorldDisk
from tests.world.machine.disk_faults import DiskFaults, Surroundings
from tests.world.machine.drawn_disk import ALL_FAULTS, Drawn, Mortal

FOLDER = Path("/runs")


class HandClock(SystemClock):
    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


def system_of(disk: Disk) -> System:
    return real_system()._replace(disk=disk, clock=HandClock())


def read(disk: Disk) -> tuple[list[Event], str]:
    """All events that can be read, and what the reader reports at the end."""
    found: list[Event] = []
    try:
        with LogReader(FOLDER / "run", disk=disk) as reader:
            for line in reader:
                found.append(line.event())
            return found, "torn" if reader.torn else "whole" if reader.clean_end else "killed"
    except TraceCorruptError:
        return found, "damaged"
    except UsageError:
        return found, "nothing"


def record(disk: Disk, on_flush: Callable[[NotedRun], None], **options: Any) -> None:
    """Record three segments."""
    run = NotedRun(FOLDER, system=system_of(disk), **options)
    on_flush(run)
    for number in range(1, 7):
        run.note(3)
        on_flush(run)
        if number % 2 == 0:
            assert run.turn()
            on_flush(run)
    run.end()


class _Full(Surroundings):
    def draw(self, what: str, number: int) -> int:
        return 0


def _start(disk: Disk, header: Event) -> None:
    LogWriter.check_folder(disk, FOLDER)
    with LogWriter(system_of(disk), FOLDER, "run") as writer:
        writer.append(encode_body(header))
        writer.flush()


@pytest.mark.parametrize("capacity", [0, 1, None])
def test_a_start_that_finds_the_disk_full_can_be_tried_again(capacity: int | None) -> None:
    """At whichever write the disk turns out to be full. None: right after the header was written."""
    header = traces.events(1)[0]
    disk = WorldDisk(_Full())
    disk.faults = DiskFaults(capacity=len(traces.lines([header])[0]) if capacity is None else capacity)
    with pytest.raises(LogWriteError, match="No space left on device; choose another folder") as caught:
        _start(disk.of("engine"), header)
    assert caught.value.exit_code == ExitCode.FAILED


def test_a_writer_that_dies_around_any_call_leaves_what_it_has_flushed() -> None:
    whole: list[Event] = []
    record(WorldDisk().of("engine"), lambda run: whole.extend(run.events[len(whole) :]))
    ends = set()
    for when in ("before", "halfway", "after"):
        for call in range(1, 100):
            disk, flushed = WorldDisk(Mortal(call, call, when)), [0]
            with contextlib.suppress(Killed):
                record(disk.of("engine"), lambda run, flushed=flushed: flushed.append(len(run.events)))  # type: ignore[misc]
                break
            disk.crash("engine")
            found, end = read(disk.of("reader"))
            assert found[: len(whole)] == whole[: len(found)], (when, call)
            assert len(found) >= flushed[-1], (when, call)
            # Without a complete header there is no trace.
            assert end != "damaged" or not found
            ends.add(end)
        assert 30 < call < 99
    assert ends == {"nothing", "damaged", "torn", "killed", "whole"}


def test_after_a_reboot_a_trace_has_its_first_lines_and_damage_is_told() -> None:
    """A run with one segment. Nothing that was written back is lost."""
    made, ends = traces.events(120, rows=60, seed=2), set()
    for seed in range(150):
        world = Drawn(seed)
        disk = WorldDisk(world)
        num_saved, num_flushed = (world.draw(what, 0) % 120 for what in ("saved", "flushed"))
        run = NotedRun(FOLDER, system=system_of(disk.of("engine")))
        for event in made[1:num_flushed]:
            if event.s == num_saved:
                disk.write_back()
            run.record(event)
        disk.reboot()
        found, end = read(disk.of("reader"))
        assert found == made[: len(found)]
        assert len(found) >= (num_saved if num_saved < num_flushed else 0)
        ends.add(end)
    assert ends == {"nothing", "damaged", "torn", "killed"}


def test_after_a_reboot_a_run_in_segments_has_only_what_was_written() -> None:
    """A segment whose name is lost is reported missing, unless it was the first; the next one has its own snapshot."""
    ends = set()
    for seed in range(500):
        disk = WorldDisk(Mortal(seed, 12 + seed % 30, "before"))
        runs: list[NotedRun] = []
        with contextlib.suppress(Killed):
            record(disk.of("engine"), runs.append)
        disk.reboot()
        found, end = read(disk.of("reader"))
        first = found[0].s if found else 0
        assert found == runs[0].events[first : first + len(found)]
        ends.add((first > 0, end))
    assert ends >= {(False, "nothing"), (False, "damaged"), (False, "killed"), (True, "killed")}


@pytest.mark.parametrize("has_links", [True, False])
def test_after_a_reboot_at_any_call_a_trace_has_what_was_synced(has_links: bool) -> None:
    whole: list[Event] = []
    record(WorldDisk().of("engine"), lambda run: whole.extend(run.events[len(whole) :]))
    num_lossy = 0
    for when, seed in itertools.product(("before", "halfway", "after"), range(3)):
        for call in range(1, 200):
            disk, synced = WorldDisk(Mortal(1000 * seed + call, call, when)), [0]
            disk.faults = DiskFaults(has_links=has_links)

            def sync(run: NotedRun, synced: list[int] = synced) -> None:
                run.writer.sync()
                synced.append(len(run.events))

            with contextlib.suppress(Killed):
                record(disk.of("engine"), sync, syncs=True, digest_key=bytes(32))
                break
            disk.reboot()
            found, end = read(disk.of("reader"))
            assert found[: len(whole)] == whole[: len(found)], (when, call)
            assert len(found) >= synced[-1], (when, call, end)
            if synced[-1]:
                assert disk.of("reader").resolve(FOLDER / LATEST_NAME) == FOLDER / "run"
                assert any(name.startswith("tokens") for name in disk.of("reader").list(FOLDER / "run"))
            num_lossy += disk.surroundings.faults["lost pages"] + disk.surroundings.faults["lost names"]
        assert 60 < call < 199
    assert num_lossy > 100


def test_what_a_failed_sync_leaves_is_cut_off_and_a_gap_names_it() -> None:
    disk, clock = WorldDisk(), HandClock()
    run = NotedRun(FOLDER, system=system_of(disk.of("engine"))._replace(clock=clock), syncs=True)
    run.note(2)
    run.writer.sync()
    run.note(3)
    disk.surroundings.draw = lambda what, number: 0  # type: ignore[method-assign]
    disk.faults = DiskFaults(sync_errors=1)
    run.writer.sync()
    disk.faults = DiskFaults()
    assert run.writer.problem == "Input/output error"
    assert run.writer.next_s == 3
    num_calls = disk._num_calls["sync"]
    run.note()
    run.writer.sync()
    clock.now_ns += 1_000_000_000
    assert run.turn()
    # The file is not synced again, only that of the new segment.
    assert disk._num_calls["sync"] == num_calls + 1
    run.end()
    disk.reboot()
    with LogReader(FOLDER / "run", disk=disk.of("reader"), strict=True) as reader:
        assert [line.event() for line in reader] == [*run.events[:3], *run.events[7:]]
        assert [(gap.first, gap.last) for gap in reader.gaps] == [(3, 6)]
    assert len(run.problems) == 2


@pytest.mark.parametrize("syncs", [False, True])
def test_once_faults_stop_a_trace_is_whole_and_its_gaps_are_what_it_lacks(syncs: bool) -> None:
    happened, num_missing = set(), 0
    for seed in range(60):
        world = Drawn(seed)
        disk, clock = WorldDisk(world), HandClock()
        system = real_system()._replace(disk=disk.of("engine"), clock=clock)
        run = NotedRun(FOLDER, system=system, segment_bytes=900, syncs=syncs)
        disk.faults = ALL_FAULTS._replace(bit_rot=0, has_links=seed % 2 == 0, capacity=6000 if seed % 3 else None)
        for _ in range(40):
            run.note(2)
            if syncs:
                run.writer.sync()
            clock.now_ns += 500_000_000
            if run.writer.segment_due:
                run.turn()
        disk.faults = DiskFaults()
        clock.now_ns += 100_000_000_000
        if run.writer.segment_due:
            assert run.turn()
        run.end()
        assert disk.open_files("engine") == []
        if syncs:
            disk.reboot()
        with LogReader(FOLDER / "run", disk=disk.of("reader"), strict=True) as reader:
            found = [line.event() for line in reader]
            assert reader.clean_end
            missing = {s for gap in reader.gaps for s in range(gap.first, gap.last + 1)}
        assert found == [event for event in run.events if event.s not in missing]
        happened |= {*world.faults}
        num_missing += len(missing)
    assert num_missing > 100
    assert happened >= {"full", "no links", "short write", *(f"error of {name}" for name in ("write", "truncate"))}
    assert happened >= {f"error of {name}" for name in ("create", "rename", "unlink")}
    assert not syncs or happened >= {"error of sync", "error of sync_folder"}
