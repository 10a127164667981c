"""What must be left of a log after a power failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.config import RecordConfig
from eventlm.system.system import real_system
from tests.bus.noted_run import NotedRun
from tests.world.invariants.power_failures import ShownEvents, events_left, is_left, num_lines_left
from tests.world.machine.disk import WorldDisk
from tests.world.machine.world import SECOND

_BEFORE = {1: b"a\nb\n", 2: b"c\nd\ne\n", 3: b"f\n"}


def test_all_lines_are_left_where_nothing_was_taken() -> None:
    assert num_lines_left(_BEFORE, dict(_BEFORE)) == 6


def test_lines_before_a_hole_are_left() -> None:
    assert num_lines_left(_BEFORE, {**_BEFORE, 2: b"c\n\0\0e\n"}) == 3
    assert num_lines_left(_BEFORE, {**_BEFORE, 2: b"c\nd"}) == 3
    assert num_lines_left(_BEFORE, {**_BEFORE, 1: b""}) == 0


def test_lines_before_a_missing_file_are_left() -> None:
    assert num_lines_left(_BEFORE, {1: _BEFORE[1], 3: _BEFORE[3]}) == 2
    assert num_lines_left(_BEFORE, {1: _BEFORE[1], 2: _BEFORE[2]}) == 5
    assert num_lines_left(_BEFORE, {}) == 0


def test_a_log_may_begin_later() -> None:
    assert num_lines_left(_BEFORE, {2: _BEFORE[2], 3: _BEFORE[3]}) == 4


def test_the_events_of_each_file_are_left_though_one_between_them_is_gone() -> None:
    disk = WorldDisk()
    run = NotedRun(Path("/runs"), system=real_system()._replace(disk=disk.of("engine")))
    for _ in range(2):
        run.note(2)
        assert run.turn()
    run.end()
    folder = Path("/runs/run")
    assert events_left(disk, folder) == set(range(len(run.events)))
    disk.of("engine").unlink(folder / "trace-000000000003.jsonl")
    assert events_left(disk, folder) == {0, 1, 2, *range(7, len(run.events))}
    assert events_left(disk, Path("/none")) == set()


@pytest.mark.parametrize(("mode", "last"), [("none", -1), ("interval", 20), ("group", 40)])
def test_what_was_shown_must_stay_as_far_as_it_was_synced(mode: str, last: int) -> None:
    disk = WorldDisk()
    shown = ShownEvents(RecordConfig(record_sync=mode, record_sync_ms=3000), disk)  # type: ignore[arg-type]
    for second, s in enumerate((10, 20, 15, 40), 1):
        shown.add("run", s, second * SECOND, num_told=0)
    assert shown.last_to_stay("run", 6 * SECOND, hindered_until_ns=0, num_told=0) == last
    assert shown.last_to_stay("another", 6 * SECOND, hindered_until_ns=0, num_told=0) == -1


def test_a_process_that_was_hindered_may_have_synced_nothing_at_an_interval() -> None:
    disk = WorldDisk()
    shown = ShownEvents(RecordConfig(record_sync="interval", record_sync_ms=10), disk)
    shown.add("run", 10, SECOND, num_told=0)
    assert shown.last_to_stay("run", 9 * SECOND, hindered_until_ns=SECOND, num_told=0) == 10
    assert shown.last_to_stay("run", 9 * SECOND, hindered_until_ns=2 * SECOND, num_told=0) == -1
    assert shown.last_to_stay("run", 9 * SECOND, hindered_until_ns=0, num_told=1) == -1
    disk.num_slow += 1
    assert shown.last_to_stay("run", 9 * SECOND, hindered_until_ns=0, num_told=0) == -1


def test_a_file_may_have_lost_its_end() -> None:
    assert is_left(b"a\nb\n", b"a\nb")
    assert not is_left(b"a\nb\n", b"a")
    assert not is_left(b"a\nb\n", b"a\n\0\0")
