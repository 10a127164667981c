from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.errors import EventLMError
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces

WRITE_FOR_EVER = """
import sys
from eventlm.bus.log_writer import LogWriter
from eventlm.system.system import real_system
from eventlm.events import UserMark
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus.traces import header
writer = LogWriter(real_system(), sys.argv[1], "run")
writer.append(encode_body(header()))
s = 0
while True:
    writer.flush()
    print(s, flush=True)
    for _ in range(3):
        s += 1
        writer.append(encode_body(UserMark(s=s, text="x" * 500)))
"""


def test_the_file_holds_the_closed_lines_in_order(tmp_path: Path) -> None:
    made = traces.events(50)
    path = traces.record(tmp_path, "run", made)
    assert path == tmp_path / "run" / "trace.jsonl"
    assert path.read_bytes() == b"".join(traces.lines(made))


def test_nothing_is_written_before_flush_and_all_of_it_after(tmp_path: Path) -> None:
    made = traces.events(4)
    closed = traces.lines(made)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        writer.append(encode_body(made[0]))
        writer.append(encode_body(made[1]))
        assert writer.path.read_bytes() == b""
        writer.flush()
        assert writer.path.read_bytes() == b"".join(closed[:2])
        writer.append(encode_body(made[2]))
    assert writer.path.read_bytes() == b"".join(closed[:3])


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_only_the_owner_can_read_a_trace(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = traces.record(tmp_path / "made" / "too", "run", traces.events(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_latest_points_to_the_newest_run_by_a_relative_link(tmp_path: Path) -> None:
    for run in ("first", "second"):
        with LogWriter(real_system(), tmp_path, run) as writer:
            writer.append(encode_body(traces.header()))
            writer.flush()
            link = tmp_path / "latest"
            assert os.readlink(link) == run
            assert (link / "trace.jsonl").samefile(writer.path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "latest", "second"]
    assert [entry.name for entry in (tmp_path / "second").iterdir()] == ["trace.jsonl"]


def test_counters_count_what_was_flushed(tmp_path: Path) -> None:
    made = traces.events(200, rows=50)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        for event in made:
            writer.append(encode_body(event))
        assert (writer.num_events, writer.num_bytes) == (0, 0)
        writer.flush()
        assert writer.num_events == 200
        assert writer.num_bytes == writer.path.stat().st_size


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:7]))
    made = traces.events(20)
    path = traces.record(tmp_path, "run", made)
    assert path.read_bytes() == b"".join(traces.lines(made))


def test_a_run_whose_header_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = traces.record(tmp_path, "before", traces.events(3))
    writer = LogWriter(real_system(), tmp_path, "run")
    writer.append(encode_body(traces.header()))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(LogWriteError, match="No space left on device; choose another folder"):
        writer.flush()
    assert issubclass(LogWriteError, EventLMError)
    writer.close()
    # It leaves nothing, and the newest run is the one before it.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["before", "latest"]
    assert (tmp_path / "latest" / "trace.jsonl").samefile(before)


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    writer = LogWriter(real_system(), tmp_path, "run")
    writer.append(encode_body(traces.header(predictor=[1, 2, 3, 4, 1 << 63])))
    with pytest.raises(
        LogWriteError, match=r"cannot record to .*, because nothing could read it: predictor\[4\]: Expec"
    ):
        writer.flush()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_where_latest_is_something_else_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with LogWriter(real_system(), tmp_path, "run") as writer:
        writer.append(encode_body(traces.header()))
        with pytest.raises(LogWriteError, match=r"cannot replace .*/latest: Is a directory"):
            writer.flush()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    path = traces.record(tmp_path, "run", traces.events(3))
    content = path.read_bytes()
    with pytest.raises(LogWriteError, match=r"cannot record to .*run/trace\.jsonl: File exists"):
        LogWriter(real_system(), tmp_path, "run")
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="choose another folder"):
        LogWriter(real_system(), tmp_path / "file", "run")


def test_close_twice(tmp_path: Path) -> None:
    writer = LogWriter(real_system(), tmp_path, "run")
    writer.close()
    writer.close()


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed_s = -1
    for line in process.stdout:
        flushed_s = int(line)
        if flushed_s >= 3000:
            break
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")[:-1]
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    flushed_s = int(rest[-1]) if rest else flushed_s
    with LogReader(tmp_path / "latest" / "trace.jsonl") as reader:
        assert [line.s for line in reader][: flushed_s + 1] == list(range(flushed_s + 1))
        assert not reader.still_being_written
        assert not reader.clean_end
