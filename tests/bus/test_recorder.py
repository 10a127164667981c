"""Whoever waits for the log waits as long as it was told to, and leaves in the order in which it came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Recorder, ThreadedRecorder
from eventlm.events import End, Event, Gap, Snapshot, UserMark
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces
from tests.bus.slow_disk import SECONDS, HandLoop, SlowDisk

LAG_BYTES = 10_000


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.answer()


class Run:
    """Writes notes through a recorder, and starts segments as an engine core does. left: drains whose effects left."""

    def __init__(
        self, folder: Path, *, lag_seconds: float | None = 1.0, sync_seconds: float | None = None, **options: Any
    ) -> None:
        self.messages: list[str] = []
        self.loop = HandLoop()
        self.writer = LogWriter(
            real_system(),
            folder,
            "run",
            syncs=sync_seconds is not None,
            on_problem=self.messages.append,
            **options,
        )
        self.recorder = ThreadedRecorder(
            real_system(),
            self.writer,
            loop=self.loop,  # type: ignore[arg-type]
            lag_seconds=lag_seconds,
            lag_bytes=LAG_BYTES,
            sync_seconds=sync_seconds,
            on_problem=self.messages.append,
            guard=lambda effect: effect(),
        )
        self.recorder.on_idle = self.start_due_segment
        self.events: list[Event] = []
        self.left: list[int] = []
        self.num_drains = 0
        self.write(traces.header())

    def stamp(self, event: Event) -> bytes:
        self.events.append(event)
        return encode_body(event)

    def write(self, *events: Event) -> None:
        """One drain."""
        number = self.num_drains
        self.num_drains += 1
        self.recorder.write([self.stamp(event) for event in events], lambda: self.left.append(number))

    def note(self, num_notes: int = 1) -> None:
        self.write(*(UserMark(s=len(self.events) + index, text="x" * 100) for index in range(num_notes)))

    def start_due_segment(self) -> None:
        if self.recorder.segment_due:
            self.start_segment()

    def start_segment(self) -> None:
        number = self.num_drains
        self.num_drains += 1
        problem, previous_h = self.recorder.problem, self.recorder.previous_h
        missing = self.writer.next_s, len(self.events) - 1

        def lines() -> Iterator[bytes]:
            yield self.stamp(traces.header(s=len(self.events), previous_h=previous_h))
            if problem:
                yield self.stamp(Gap(s=len(self.events), first=missing[0], last=missing[1], reason=problem))
            yield self.stamp(Snapshot(s=len(self.events), state=Raw(b"{}")))

        self.recorder.start_segment(len(self.events), lines(), lambda: self.left.append(number))

    def end(self, *, patience_seconds: float = SECONDS) -> None:
        """What is being written is waited for in real time, of which a busy machine may need much."""
        self.recorder._lag_seconds = patience_seconds
        self.recorder.settle()
        if self.recorder.problem:
            self.start_segment()
        self.write(End(s=len(self.events)))
        self.recorder.close()

    def all_left(self) -> bool:
        """Everything that was waiting, once and in its order."""
        return self.left == list(range(self.num_drains))

    def read(self) -> tuple[list[int], list[tuple[int, int]], bool]:
        """The `s` of all lines, which are what was stamped; the gaps; whether the end is clean."""
        with LogReader(self.writer.run_folder) as reader:
            found = [line.event() for line in reader]
            assert found == [self.events[event.s] for event in found]
            return [event.s for event in found], [(gap.first, gap.last) for gap in reader.gaps], reader.clean_end


def test_who_waits_for_the_disk_waits_until_it_answers(tmp_path: Path, disk: SlowDisk) -> None:
    left: list[int] = []
    with LogWriter(real_system(), tmp_path, "run") as writer:
        recorder = Recorder(writer)
        recorder.write([encode_body(traces.header())], lambda: left.append(0))
        assert left == [0]
        disk.hang()
        note = encode_body(UserMark(s=1, text="x"))
        writing = threading.Thread(target=recorder.write, args=([note], lambda: left.append(1)))
        writing.start()
        assert disk.hangs.wait(SECONDS)
        assert left == [0]
        disk.answer()
        writing.join(SECONDS)
        assert left == [0, 1]


def test_effects_leave_behind_their_write_and_what_waits_goes_in_one(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    num_writes = disk.num_writes
    for _ in range(5):
        run.note(2)
    run.loop.sleep(0.9)
    assert run.left == [0]
    disk.answer()
    run.loop.turn()
    assert run.left == [0, 1]
    run.loop.turn()
    assert run.all_left()
    assert disk.num_writes == num_writes + 1
    run.end()
    assert run.all_left()
    assert run.messages == []
    assert run.read() == (list(range(len(run.events))), [], True)


def test_what_takes_too_long_is_given_up_and_a_gap_says_so(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    run.note()
    run.loop.turn()
    disk.hang()
    run.note(2)
    assert disk.hangs.wait(SECONDS)
    run.note(3)
    run.loop.sleep(0.99)
    assert run.left == [0, 1]
    run.loop.sleep(0.02)
    assert run.all_left()
    for _ in range(1000):
        run.note(10)
        assert run.all_left()
    assert not run.recorder._waiting
    assert len(run.messages) == 1
    assert run.recorder.problem == "a write took longer than 1000 ms"
    last_missing = len(run.events) - 1
    disk.answer()
    # The segment begins at once; what comes meanwhile stands behind it.
    run.loop.turn()
    run.note()
    run.loop.turn()
    run.loop.turn()
    run.end()
    assert run.all_left()
    path, reason = run.writer.path, "a write took longer than 1000 ms"
    assert run.messages == [
        f"the trace {path} lags: {reason}; events are lost until the disk answers",
        f"the trace {path} is written again; events 4 to {last_missing} are not in it: {reason}",
    ]
    found, gaps, clean_end = run.read()
    assert (gaps, clean_end) == ([(4, last_missing)], True)
    assert found == [s for s in range(len(run.events)) if not 4 <= s <= last_missing]


def test_a_write_that_is_late_while_nothing_else_happens_loses_nothing(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.loop.sleep(2)
    assert run.all_left()
    disk.answer()
    run.loop.turn()
    assert run.messages[1:] == [f"the trace {run.writer.path} is written again; no event was lost"]
    run.note()
    run.end()
    assert run.read() == (list(range(4)), [], True)


def test_a_loop_that_was_busy_blames_no_disk(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    run.note()
    assert run.recorder._thread.wait(SECONDS)
    run.loop.sleep(5)
    assert run.messages == []
    run.loop.turn()
    run.end()
    assert run.read()[1:] == ([], True)


def test_no_more_waits_than_may(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    first_lost = len(run.events)
    while not run.messages:
        assert sum(len(body) for entry in run.recorder._waiting for body in entry.bodies) <= LAG_BYTES
        run.note(3)
    assert run.all_left()
    assert run.num_drains > 10
    assert run.recorder.problem == f"more than {LAG_BYTES} bytes waited for the disk"
    last_lost = len(run.events) - 1
    disk.answer()
    run.end()
    assert run.read()[1:] == ([(first_lost, last_lost)], True)


def test_a_disk_that_fills_up_loses_what_waits_too(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.note()
    run.note()
    disk.num_full = 1 << 30
    disk.answer()
    run.loop.turn()
    assert run.all_left()
    run.note()
    assert run.all_left()
    assert len(run.messages) == 1
    disk.num_full = 0
    run.end()
    assert run.read()[1:] == ([(1, 4)], True)
    assert run.all_left()


def run_on_a_disk_that_hangs(folder: Path, disk: SlowDisk) -> Run:
    """One in which the next segment is due."""
    run = Run(folder, segment_bytes=500)
    run.note()
    run.loop.turn()
    # The header was long enough for a segment.
    run.loop.turn()
    disk.hang()
    run.note(4)
    assert disk.hangs.wait(SECONDS)
    return run


def test_a_segment_begins_after_what_waits_for_it(tmp_path: Path, disk: SlowDisk) -> None:
    run = run_on_a_disk_that_hangs(tmp_path, disk)
    run.note(1)
    run.note(1)
    disk.answer()
    run.loop.turn()
    assert isinstance(run.events[-1], Snapshot)
    run.note()
    run.end()
    assert run.all_left()
    with LogReader(run.writer.run_folder) as reader:
        assert reader.num_segments > 1
    assert run.read() == (list(range(len(run.events))), [], True)


@pytest.mark.parametrize("num_full", [1, 2, 1 << 30])
def test_a_segment_after_lost_events_is_lost_too(tmp_path: Path, disk: SlowDisk, num_full: int) -> None:
    run = run_on_a_disk_that_hangs(tmp_path, disk)
    run.note()
    disk.answer()
    assert run.recorder._thread.wait(SECONDS)
    disk.num_full = num_full
    # The note and the beginning of a segment that would follow it.
    run.loop.turn()
    run.loop.turn()
    assert isinstance(run.events[-1], Snapshot)
    assert run.all_left()
    disk.num_full = 0
    last_missing = len(run.events) - 1
    run.end()
    assert run.read()[1:] == ([(8, last_missing)], True)


def test_what_is_lost_while_a_segment_ends_a_gap_is_told_before_its_end(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.num_full = 1
    run.note()
    run.loop.turn()
    disk.hang()
    run.start_segment()
    assert disk.hangs.wait(SECONDS)
    run.loop.sleep(1.01)
    run.note()
    disk.answer()
    run.loop.turn()
    run.end()
    are_ends = ["is written again" in message for message in run.messages]
    assert are_ends == [False, False, True, False, True]
    assert len(run.read()[1]) == 2


def test_where_no_file_can_be_made_the_stamped_lines_are_a_gap(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path, segment_bytes=500)
    obstacle = run.writer.run_folder / "trace.jsonl.next"
    obstacle.mkdir()
    run.note(6)
    run.loop.turn()
    run.loop.turn()
    assert run.all_left()
    assert run.recorder.problem
    obstacle.rmdir()
    run.end()
    assert run.read()[1:] == ([(7, 8)], True)


def test_an_end_waits_for_a_hanging_disk_no_longer_than_others_do(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.note()
    run.end(patience_seconds=0.01)
    assert run.all_left()
    *_, thread = (each for each in threading.enumerate() if each.name == "eventlm-recorder")
    disk.answer()
    thread.join(SECONDS)
    assert not thread.is_alive()
    # The write came to its end, and the lock is released.
    assert run.read() == ([0, 1], [], False)
    with LogReader(run.writer.run_folder) as reader:
        assert not reader.still_being_written


def test_a_disk_that_answers_while_the_run_ends_has_its_end(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path)
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.note()
    run.loop.sleep(2)
    run.note()
    disk.answer()
    run.end()
    assert run.all_left()
    found, gaps, clean_end = run.read()
    assert (gaps, clean_end) == ([(2, 3)], True)
    assert found == [0, 1, *range(4, len(run.events))]
    # The calls of the thread come too late to do anything.
    run.loop.turn()
    assert run.all_left()


@pytest.mark.parametrize("lag_seconds", [None, SECONDS])
def test_in_a_group_effects_leave_behind_a_sync_that_began_after_their_write(
    tmp_path: Path, disk: SlowDisk, lag_seconds: float | None
) -> None:
    run = Run(tmp_path, lag_seconds=lag_seconds, sync_seconds=0)
    num_syncs, num_lines = disk.num_syncs, run.writer.num_events
    disk.hang(takes_writes=True)
    run.note()
    assert disk.hangs.wait(SECONDS)
    # It is written, and waits for its sync; what comes now shares the next one.
    assert run.writer.num_events == num_lines + 1
    for _ in range(5):
        run.note(2)
    run.loop.sleep(SECONDS - 1)
    assert run.left == [0]
    disk.answer()
    run.loop.turn()
    assert run.left == [0, 1]
    run.loop.turn()
    assert run.all_left()
    assert disk.num_syncs == num_syncs + 2
    run.end()
    assert disk.num_syncs == num_syncs + 3
    assert run.read() == (list(range(len(run.events))), [], True)


def test_who_waits_without_limit_gives_nothing_up_and_keeps_no_more_than_may_wait(
    tmp_path: Path, disk: SlowDisk
) -> None:
    run = Run(tmp_path, lag_seconds=None, sync_seconds=0)
    settle, waits = run.recorder.settle, threading.Event()

    def wait() -> None:
        waits.set()
        settle()

    run.recorder.settle = wait  # type: ignore[method-assign]
    disk.hang()
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.loop.sleep(1e6)
    run.note()
    assert run.left == [0]
    # The loop waits, too.
    loop = threading.Thread(target=run.note, args=(LAG_BYTES // 100,))
    loop.start()
    assert waits.wait(SECONDS)
    assert run.left == [0]
    disk.answer()
    loop.join(SECONDS)
    assert run.all_left()
    run.end()
    assert run.messages == []
    assert run.read() == (list(range(len(run.events))), [], True)


def test_what_takes_too_long_to_sync_is_given_up_like_a_write(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path, sync_seconds=0)
    disk.hang(takes_writes=True)
    run.note()
    assert disk.hangs.wait(SECONDS)
    run.note()
    run.loop.sleep(1.01)
    assert run.all_left()
    assert run.recorder.problem == "a write took longer than 1000 ms"
    disk.answer()
    run.end()
    assert run.read()[1:] == ([(2, 2)], True)


def test_at_an_interval_effects_wait_for_no_sync(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run(tmp_path, lag_seconds=None, sync_seconds=1)
    num_syncs = disk.num_syncs
    run.note()
    run.loop.turn()
    run.loop.sleep(0.9)
    run.note()
    run.loop.turn()
    assert run.all_left()
    assert disk.num_syncs == num_syncs
    disk.hang()
    run.loop.sleep(0.1)
    assert disk.hangs.wait(SECONDS)
    # This one comes while the log is synced.
    run.note()
    assert not run.all_left()
    disk.answer()
    run.loop.turn()
    run.loop.turn()
    assert run.all_left()
    assert disk.num_syncs == num_syncs + 1
    run.loop.sleep(1)
    run.loop.turn()
    assert disk.num_syncs == num_syncs + 2
    # Where nothing is written, there is nothing to sync.
    num_timers = run.loop.num_timers
    run.loop.sleep(100)
    assert run.loop.num_timers == num_timers
    run.end()
    assert run.read() == (list(range(len(run.events))), [], True)


@pytest.mark.parametrize(("sync_seconds", "first_lost"), [(0, 2), (1, 1)])
def test_what_a_failed_sync_leaves_is_lost(
    tmp_path: Path, disk: SlowDisk, sync_seconds: float, first_lost: int
) -> None:
    run = Run(tmp_path, sync_seconds=sync_seconds)
    run.note()
    run.loop.turn()
    disk.num_failing = 1
    run.note(2)
    run.loop.turn()
    if sync_seconds:
        run.loop.sleep(1)
        run.loop.turn()
    assert run.all_left()
    assert run.recorder.problem == "Input/output error"
    run.note()
    assert run.all_left()
    assert run.writer.next_s == first_lost
    run.end()
    assert run.all_left()
    assert run.read()[1:] == ([(first_lost, 4)], True)
    assert len(run.messages) == 2


def test_a_header_that_cannot_be_written_is_an_error_at_once(tmp_path: Path, disk: SlowDisk) -> None:
    disk.num_full = 1 << 30
    with pytest.raises(LogWriteError, match="No space left on device"):
        Run(tmp_path)


def test_a_header_that_cannot_be_synced_is_an_error_at_once(tmp_path: Path, disk: SlowDisk) -> None:
    disk.num_failing = 1
    with pytest.raises(LogWriteError, match="Input/output error; choose another folder"):
        Run(tmp_path, sync_seconds=0)
