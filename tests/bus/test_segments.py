"""A run in several segments: it reads as one log, wherever its writer died, whatever its disk did."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec import Raw

from eventlm.bus.log_reader import LogReader, read_history
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import NEXT_NAME, TRACE_NAME, closed_segments
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import Event, Snapshot, UserMark
from eventlm.events.codec import encode_body
from eventlm.system.clock import SystemClock
from eventlm.system.system import real_system
from tests.bus import traces
from tests.bus.crashes import Killed, die_at
from tests.bus.noted_run import NotedRun


@pytest.fixture
def recorder(tmp_path: Path) -> NotedRun:
    return NotedRun(tmp_path)


def read(folder: Path) -> list[Event]:
    with LogReader(folder) as reader:
        return [line.event() for line in reader]


def test_a_run_in_segments_reads_as_one_log(recorder: NotedRun) -> None:
    folder = recorder.writer.run_folder
    for _ in range(4):
        recorder.note(3)
        assert recorder.turn()
    recorder.note()
    recorder.end()
    names = [f"trace-{s:012}.jsonl" for s in (0, 4, 9, 14)]
    assert sorted(os.listdir(folder)) == [*names, TRACE_NAME]
    with LogReader(folder, strict=True) as reader:
        assert [line.event() for line in reader] == recorder.events
        assert (reader.num_segments, reader.num_lines, reader.clean_end) == (5, len(recorder.events), True)
        assert reader.position == reader.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert reader.warnings() == []
        for s in range(len(recorder.events)):
            assert next(reader.lines_from(s)).s == s
        assert [line.s for line in reader.lines_from(8)] == list(range(8, len(recorder.events)))
    with LogReader(folder / names[1]) as reader:
        assert [line.s for line in reader] == [4, 5, 6, 7, 8]
        assert reader.warnings() == []
    assert list(read_history(folder, 3, 10)) == recorder.events[3:11]


def test_a_segment_is_due_by_the_bytes_after_its_snapshot(tmp_path: Path) -> None:
    writer = LogWriter(real_system(), tmp_path, "run", segment_bytes=1000)
    writer.append(encode_body(traces.header()))
    writer.append(encode_body(UserMark(s=1, text="x" * 1000)))
    writer.flush()
    assert writer.segment_due
    lines = [traces.header(s=2, previous_h=writer.previous_h), Snapshot(s=3, state=Raw(b'"' + b"x" * 5000 + b'"'))]
    assert writer.start_segment(2, map(encode_body, lines))
    assert not writer.segment_due
    writer.close()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_process_that_dies_while_a_segment_begins_leaves_a_readable_run(tmp_path: Path, has_links: bool) -> None:
    for fail_at in range(50):
        folder = tmp_path / str(fail_at)
        recorder = NotedRun(folder)
        recorder.note(3)
        assert recorder.turn()
        recorder.note(3)
        num_written = len(recorder.events)
        with pytest.MonkeyPatch.context() as patch:
            if not has_links:
                patch.setattr(os, "link", _refuse)
            calls = die_at(patch, fail_at)
            try:
                recorder.turn()
                is_done = True
            except Killed:
                is_done = False
        found = read(folder / "run")
        assert found[:num_written] == recorder.events[:num_written], calls
        assert found == recorder.events[: len(found)]
        if is_done:
            assert fail_at > 5
            break
    else:
        pytest.fail("it never came to its end")


def _refuse(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_segment_that_is_missing_in_the_middle_is_an_error_and_one_at_the_start_is_not(recorder: NotedRun) -> None:
    folder = recorder.writer.run_folder
    for _ in range(3):
        recorder.note(3)
        recorder.turn()
    recorder.end()
    first, second, third = (segment.path for segment in closed_segments(folder))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(
        TraceCorruptError, match=r"events 4 to 8 are missing between .*000000\.jsonl and .*000009\.jsonl"
    ):
        read(folder)
    first.unlink()
    assert read(folder) == recorder.events[9:]
    assert list(read_history(folder, 0, 9)) == recorder.events[9:10]
    second.write_bytes(content[:-5])
    with pytest.raises(TraceCorruptError, match="the line is cut short, and a segment follows"):
        read(folder)
    second.write_bytes(content.replace(b'"text":"x', b'"text":"y', 1))
    with pytest.raises(TraceCorruptError, match="its hash does not match"):
        read(folder)
    second.write_bytes(content)
    lines = third.read_bytes().splitlines(keepends=True)
    other = traces.lines([traces.header(s=9, previous_h="0" * 16)], previous_h="0" * 16)
    third.write_bytes(b"".join(other + lines[1:]))
    with pytest.raises(TraceCorruptError, match="it does not follow"):
        read(folder)


class Disk:
    """A disk with so much room. What does not fit is not written, as write(2) has it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, code: int = errno.ENOSPC) -> None:
        self.room = 1 << 40
        self.code = code
        self.can_truncate = True
        self._write, self._truncate = os.write, os.ftruncate
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "ftruncate", self.truncate)

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(self.code, os.strerror(self.code))
        written = self._write(fd, data[: self.room])
        self.room -= written
        return written

    def truncate(self, fd: int, size: int) -> None:
        if not self.can_truncate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._truncate(fd, size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: int(now[0] * 1e9))
    return now


@pytest.mark.parametrize("room", [0, 1, 100, 162, 400])
@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_a_full_disk_does_not_take_becomes_a_gap(
    recorder: NotedRun, monkeypatch: pytest.MonkeyPatch, clock: list[float], room: int, can_truncate: bool, code: int
) -> None:
    folder, writer = recorder.writer.run_folder, recorder.writer
    recorder.note(3)
    disk = Disk(monkeypatch, code=code)
    disk.room, disk.can_truncate = room, can_truncate
    recorder.note(5)
    assert recorder.problems == [
        f"cannot write to the trace {folder}/trace.jsonl: {os.strerror(code)}; events are lost until it can be"
    ]
    first_missing = writer.next_s
    assert 4 <= first_missing < 9
    assert read(folder) == recorder.events[:first_missing]
    for _ in range(1000):
        recorder.note(3)
    assert not writer._bodies
    assert not writer.segment_due
    clock[0] += 1.5
    assert writer.segment_due
    assert not recorder.turn()
    assert not writer.segment_due
    assert read(folder) == recorder.events[:first_missing]
    disk.room, disk.can_truncate = 1 << 40, True
    clock[0] += 2.5
    last_missing, problem = len(recorder.events) - 1, writer.problem
    assert recorder.turn()
    recorder.note(2)
    recorder.end()
    assert recorder.problems[1:] == [
        f"the trace {folder}/trace.jsonl is written again; events {first_missing} to {last_missing} are not in it: "
        f"{problem}"
    ]
    with LogReader(folder, strict=True) as reader:
        events = [line.event() for line in reader]
        assert events == recorder.events[:first_missing] + recorder.events[last_missing + 1 :]
        assert [(gap.first, gap.last) for gap in reader.gaps] == [(first_missing, last_missing)]
        assert reader.num_missing == last_missing - first_missing + 1
        assert reader.clean_end
        # From within the gap one comes to what follows it.
        assert next(reader.lines_from(first_missing + 1)).s == last_missing + 1
    (segment,) = closed_segments(folder)
    assert segment.path.read_bytes().endswith(b"}\n")


def test_a_disk_that_fills_up_within_the_new_segment_leaves_the_run_as_it_was(
    recorder: NotedRun, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    folder = recorder.writer.run_folder
    recorder.note(3)
    disk = Disk(monkeypatch)
    num_written = len(recorder.events)
    size = len(encode_body(recorder.events[0])) + 200
    for room in range(0, size, 97):
        disk.room = room
        assert not recorder.turn()
        assert read(folder) == recorder.events[:num_written]
        assert not (folder / NEXT_NAME).exists()
        clock[0] += 100
    disk.room = 1 << 40
    recorder.note()
    assert recorder.turn()
    recorder.end()
    with LogReader(folder) as reader:
        assert [line.s for line in reader][:num_written] == list(range(num_written))
        assert reader.gaps[0].first == num_written


def test_where_no_file_can_be_made_the_last_segment_goes_on(recorder: NotedRun, clock: list[float]) -> None:
    folder = recorder.writer.run_folder
    recorder.note()
    folder.joinpath(NEXT_NAME).mkdir()
    assert not recorder.turn()
    recorder.note(3)
    recorder.end()
    assert recorder.problems == []
    assert read(folder) == recorder.events


def test_a_closed_segment_is_not_read_while_it_is_gone(recorder: NotedRun) -> None:
    recorder.note()
    recorder.turn()
    recorder.note()
    reader = LogReader(recorder.writer.run_folder)
    closed_segments(recorder.writer.run_folder)[0].path.unlink()
    with reader, pytest.raises(UsageError, match="was removed while the trace was read"):
        list(reader)
    recorder.end()
