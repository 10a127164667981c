from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.trace_repair import RepairResult, repair
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces


def _torn(path: Path, *, num_bytes: int = 20) -> tuple[list[bytes], bytes]:
    """A trace of six lines, the last of them cut to num_bytes; its lines, and the file as it is."""
    closed = traces.lines(traces.events(6, end=False))
    content = b"".join(closed[:-1]) + closed[-1][:num_bytes]
    path.write_bytes(content)
    return closed, content


def test_a_torn_tail_is_cut_off_and_the_torn_file_kept(tmp_path: Path) -> None:
    path, copy = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.broken"
    closed, content = _torn(path)
    assert repair(path) == RepairResult(path=str(path), num_lines=5, removed_bytes=20, copy=str(copy))
    assert path.read_bytes() == b"".join(closed[:-1])
    assert copy.read_bytes() == content
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with LogReader(path, strict=True) as reader:
        assert sum(1 for _ in reader) == 5


@pytest.mark.parametrize("num_bytes", [1, -27, -2, -1])
def test_wherever_the_tear_is(tmp_path: Path, num_bytes: int) -> None:
    closed, _ = _torn(tmp_path / "t", num_bytes=num_bytes)
    assert repair(tmp_path / "t").removed_bytes == len(closed[-1][:num_bytes])
    assert (tmp_path / "t").read_bytes() == b"".join(closed[:-1])


def test_an_older_copy_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t"
    contents = [_torn(path, num_bytes=num_bytes)[1] for num_bytes in (5, 6, 7)]
    for content in contents:
        path.write_bytes(content)
        repair(path)
    for name, content in zip(("t.broken", "t.2.broken", "t.3.broken"), contents, strict=True):
        assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("end", [True, False])
def test_of_a_trace_that_is_not_torn_nothing_is_repaired(tmp_path: Path, end: bool) -> None:
    closed = traces.write(tmp_path / "t", traces.events(6, end=end))
    assert repair(tmp_path / "t") == RepairResult(path=str(tmp_path / "t"), num_lines=6)
    assert (tmp_path / "t").read_bytes() == b"".join(closed)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_damage_in_the_middle_is_not_a_torn_tail(tmp_path: Path) -> None:
    _, content = _torn(tmp_path / "t")
    damaged = content.replace(b'"ts":2000', b'"ts":2001')
    (tmp_path / "t").write_bytes(damaged)
    with pytest.raises(TraceCorruptError, match="line 3, "):
        repair(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == damaged
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_a_torn_header_leaves_nothing_to_keep(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b'{"t":"header","s":0')
    with pytest.raises(TraceCorruptError, match="nothing of it can be used"):
        repair(tmp_path / "t")


def test_a_trace_that_is_being_written_is_refused(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run") as writer:
        for event in traces.events(6, end=False):
            writer.append(encode_body(event))
        writer.flush()
        with open(writer.path, "ab") as file:
            file.write(b'{"t":"ha')
        with pytest.raises(UsageError, match="is still being written; stop the engine"):
            repair(writer.path)
        assert writer.path.read_bytes().endswith(b'{"t":"ha')
    assert repair(writer.path).removed_bytes == 8


def test_a_trace_that_another_repair_holds_is_refused(tmp_path: Path) -> None:
    _torn(tmp_path / "t")
    with open(tmp_path / "t", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(UsageError, match="still being written"):
            repair(tmp_path / "t")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_without_room_for_the_copy_the_trace_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    _, content = _torn(tmp_path / "t")
    with pytest.raises(UsageError, match="No space left on device; it is as it was"):
        repair(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]
