"""A run is recorded and read back without a file, and the disk of the host does what the one in memory does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader, read_history
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import TRACE_NAME, closed_segments, newest_run, newest_running
from eventlm.bus.run_list import list_runs
from eventlm.bus.token_log_reader import open_token_log
from eventlm.bus.trace_repair import repair
from eventlm.events import Event, StepCompleted
from eventlm.system.disk import SYSTEM_DISK, Disk, sync_path
from eventlm.system.system import real_system
from tests.simulation import DIGEST_KEY, Simulation
from tests.world.machine.disk import WorldDisk

RUN, OLD_RUN = "20250102-000000-aaaaaa", "20250101-000000-aaaaaa"


def record(disk: Disk, folder: Path, run: str, **options: int) -> list[Event]:
    """A workload with its token log, in segments."""
    writer = LogWriter(
        real_system()._replace(disk=disk), folder, run, segment_bytes=8192, digest_key=DIGEST_KEY, **options
    )
    assert newest_running(folder, disk) == folder / run
    Simulation(1, writer=writer, check_every=0, records_tokens=True).run()
    with LogReader(folder / run, strict=True, disk=disk) as reader:
        assert reader.num_segments > 1
        return [line.event() for line in reader]


def content_of(disk: Disk, run_folder: Path) -> dict[str, bytes]:
    found = {}
    for name in disk.list(run_folder):
        with contextlib.closing(disk.open(run_folder / name)) as file:
            found[name] = file.read(1 << 30)
    return found


def test_a_run_is_recorded_and_read_back_in_memory(tmp_path: Path) -> None:
    disk, folder = WorldDisk().of("test"), Path("/runs")
    events = record(disk, folder, RUN)
    assert events == record(SYSTEM_DISK, tmp_path, RUN)
    assert content_of(disk, folder / RUN) == content_of(SYSTEM_DISK, tmp_path / RUN)
    assert newest_run(folder, disk) == folder / "latest"
    assert newest_running(folder, disk) is None
    (summary,) = list_runs(folder, disk=disk)
    assert (summary.run, summary.end, summary.num_events) == (RUN, "end", len(events))
    assert list(read_history(folder / RUN, 10, 12, disk=disk)) == events[10:13]
    assert not Path("/runs").exists()


def test_old_segments_are_removed_in_memory() -> None:
    disk, folder = WorldDisk().of("test"), Path("/runs")
    record(disk, folder, OLD_RUN)
    events = record(disk, folder, RUN, keep_bytes=60_000, keep_all_runs=True)
    assert sorted(disk.list(folder)) == [RUN, "latest"]
    segments = closed_segments(folder / RUN, disk)
    assert 0 < events[0].s == segments[0].first_s
    with LogReader(folder / RUN, disk=disk) as reader:
        token_log = open_token_log(segments[0].path, reader.header, disk)
    completed = next(event for event in events if isinstance(event, StepCompleted))
    assert token_log.outputs(completed) is not None


def test_a_torn_trace_is_repaired_in_memory() -> None:
    disk, run_folder = WorldDisk().of("test"), Path("/runs") / RUN
    record(disk, run_folder.parent, RUN)
    trace = run_folder / TRACE_NAME
    file = disk.append(trace)
    num_bytes = file.status().num_bytes
    file.truncate(num_bytes - 5)
    file.close()
    torn = content_of(disk, run_folder)[TRACE_NAME]
    result = repair(trace, disk)
    repaired = content_of(disk, run_folder)
    assert repaired[f"{TRACE_NAME}.broken"] == torn == repaired[TRACE_NAME] + torn[-result.removed_bytes :]


@pytest.fixture(params=["memory", "system"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return WorldDisk().of("test") if request.param == "memory" else SYSTEM_DISK


def test_a_new_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, removed = tmp_path / "file", fcntl.flock, []

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            removed.append(os.fstat(fd).st_ino)
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    file = SYSTEM_DISK.create(path)
    assert file.write(b"kept") == 4
    assert path.read_bytes() == b"kept"
    assert removed
    file.close()


def test_disks_agree(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    disk.make_folders(folder)
    disk.make_folders(folder)
    with pytest.raises(FileExistsError):
        disk.make_folder(folder)
    file = disk.create(folder / "file")
    with pytest.raises(FileExistsError):
        disk.create(folder / "file")
    with pytest.raises(BlockingIOError):
        disk.append(folder / "file")
    assert file.write(b"one\ntwo\n") == 8
    reader = disk.open(folder / "file")
    assert reader.is_locked()
    file.close()
    file.close()
    assert not reader.is_locked()
    assert [reader.readline(100), reader.tell(), reader.seek(1), reader.read(2)] == [b"one\n", 4, 1, b"ne"]
    disk.link(folder / "file", folder / "second")
    with pytest.raises(FileExistsError):
        disk.link(folder / "file", folder / "second")
    disk.unlink(folder / "file")
    disk.unlink(folder / "file")
    assert disk.list(folder) == ["second"]
    file = disk.append(folder / "second")
    file.write(b"three\n")
    file.sync()
    file.truncate(9)
    status = disk.status(folder / "second")
    assert status == file.status() == reader.status()
    assert status is not None
    assert (status.num_bytes, status.is_file, status.is_folder, status.mode) == (9, True, False, 0o600)
    assert disk.read(folder / "second") == b"one\ntwo\nt"
    file.close()
    disk.symlink("b", tmp_path / "a" / "link")
    assert disk.is_link(tmp_path / "a" / "link")
    assert not disk.is_link(folder)
    assert disk.resolve(tmp_path / "a" / "link") == folder
    assert disk.status(tmp_path / "a" / "link" / "second") == status
    with pytest.raises(OSError, match="not empty"):
        disk.remove_folder(folder)
    disk.rename(folder / "second", tmp_path / "a" / "third")
    sync_path(disk, folder)
    with pytest.raises(FileNotFoundError):
        disk.sync_folder(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        disk.sync_folder(tmp_path / "a" / "third")
    disk.remove_folder(folder)
    assert disk.status(folder) is None
    assert disk.status(tmp_path / "a" / "third" / "below") is None
    assert disk.is_writable(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        disk.open(folder / "file")
    with pytest.raises(FileNotFoundError):
        disk.read(folder / "file")
    with pytest.raises(OSError, match="directory"):
        disk.list(tmp_path / "none")


def test_the_hosts_files_are_private(tmp_path: Path) -> None:
    SYSTEM_DISK.make_folder(tmp_path / "folder")
    SYSTEM_DISK.create(tmp_path / "file").close()
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
