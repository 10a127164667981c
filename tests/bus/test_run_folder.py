"""What is kept of runs, and what goes."""

from __future__ import annotations

import os
from pathlib import Path

from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import TRACE_NAME, closed_name, lasting_path, newest_run, prune
from eventlm.events.codec import encode_body
from eventlm.system.disk import SYSTEM_DISK, ReadableFile, SystemDisk
from eventlm.system.system import real_system
from tests.bus import traces

OLD, MIDDLE, NEW = "20250101-000000-aaaaaa", "20250102-000000-aaaaaa", "20250103-000000-aaaaaa"


def make_run(folder: Path, run: str, sizes: list[int]) -> Path:
    """Segments of these sizes, the last of them under its own name."""
    (folder / run).mkdir(parents=True)
    names = [closed_name(100 * index) for index in range(len(sizes) - 1)] + [TRACE_NAME]
    for name, size in zip(names, sizes, strict=True):
        (folder / run / name).write_bytes(b"x" * size)
    return folder / run


def test_a_name_that_stays_that_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, OLD, [1, 1])
    (tmp_path / "latest").symlink_to(OLD)
    for each in (run, run / TRACE_NAME, tmp_path / "latest", tmp_path / "latest" / TRACE_NAME):
        assert lasting_path(str(each)) == str(run)
    assert lasting_path("runs/trace.jsonl") == "runs"
    for other in ("trace.jsonl", "monday.jsonl", "none/latest"):
        assert lasting_path(other) == other


def left(folder: Path) -> list[str]:
    return sorted(f"{path.parent.name[:8]}/{path.name}" for path in folder.glob("*/*") if not path.parent.is_symlink())


def test_the_oldest_segments_of_a_run_go_first_and_its_last_never(tmp_path: Path) -> None:
    run = make_run(tmp_path, NEW, [10, 10, 10, 10])
    other = make_run(tmp_path, OLD, [100])
    prune(SYSTEM_DISK, run, keep_bytes=25, all_runs=False)
    assert [path.name for path in sorted(run.iterdir())] == [closed_name(200), TRACE_NAME]
    prune(SYSTEM_DISK, run, keep_bytes=0, all_runs=False)
    assert [path.name for path in run.iterdir()] == [TRACE_NAME]
    assert (other / TRACE_NAME).exists()


def test_of_a_folder_of_runs_the_oldest_go_first_with_all_that_is_theirs(tmp_path: Path) -> None:
    make_run(tmp_path, OLD, [10, 10, 10])
    make_run(tmp_path, MIDDLE, [10, 10])
    run = make_run(tmp_path, NEW, [10, 10])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / TRACE_NAME).write_bytes(b"x" * 1000)
    prune(SYSTEM_DISK, run, keep_bytes=55, all_runs=True)
    assert left(tmp_path) == sorted(
        [
            f"20250101/{TRACE_NAME}",
            f"20250102/{closed_name(0)}",
            f"20250102/{TRACE_NAME}",
            f"20250103/{closed_name(0)}",
            f"20250103/{TRACE_NAME}",
            f"mine/{TRACE_NAME}",
        ]
    )
    prune(SYSTEM_DISK, run, keep_bytes=15, all_runs=True)
    assert left(tmp_path) == [f"20250103/{TRACE_NAME}", f"mine/{TRACE_NAME}"]
    assert sorted(os.listdir(tmp_path)) == [NEW, "mine"]


def test_a_run_that_is_being_written_stays_whole(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, OLD) as writer:
        writer.append(encode_body(traces.header()))
        writer.flush()
        (tmp_path / OLD / closed_name(0)).write_bytes(b"x" * 100)
        run = make_run(tmp_path, NEW, [10])
        prune(SYSTEM_DISK, run, keep_bytes=0, all_runs=True)
        assert sorted(os.listdir(tmp_path / OLD)) == [closed_name(0), TRACE_NAME]
    prune(SYSTEM_DISK, run, keep_bytes=0, all_runs=True)
    assert not (tmp_path / OLD).exists()


def test_a_run_that_lost_its_last_segment_is_removed(tmp_path: Path) -> None:
    """In a power failure, or where there are no links and its writer died between two renames."""
    make_run(tmp_path, OLD, [10, 10, 0])
    middle = make_run(tmp_path, MIDDLE, [10, 10])
    (middle / TRACE_NAME).unlink()
    (middle / "latest").symlink_to(MIDDLE)
    run = make_run(tmp_path, NEW, [10])
    last = SYSTEM_DISK.append(middle / closed_name(0))
    prune(SYSTEM_DISK, run, keep_bytes=0, all_runs=True)
    assert left(tmp_path) == [f"20250102/{name}" for name in ("latest", closed_name(0))] + [f"20250103/{TRACE_NAME}"]
    last.close()
    prune(SYSTEM_DISK, run, keep_bytes=0, all_runs=True)
    assert os.listdir(tmp_path) == [NEW]


def test_a_run_that_has_only_been_made_stays(tmp_path: Path) -> None:
    make_run(tmp_path, OLD, [0])
    prune(SYSTEM_DISK, make_run(tmp_path, NEW, [10]), keep_bytes=0, all_runs=True)
    assert sorted(os.listdir(tmp_path)) == [OLD, NEW]


def test_a_run_whose_segment_begins_while_it_is_looked_at_stays_whole(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, OLD) as writer:
        writer.append(encode_body(traces.header()))
        writer.flush()

        class Disk(SystemDisk):
            def open(self, path: Path) -> ReadableFile:
                found = super().open(path)
                header = traces.header()
                writer.start_segment(header.s, iter([encode_body(header)]))
                return found

        prune(Disk(), make_run(tmp_path, NEW, [10]), keep_bytes=0, all_runs=True)
        assert sorted(os.listdir(tmp_path / OLD)) == [closed_name(0), TRACE_NAME]


def test_a_file_of_the_users_keeps_its_folder(tmp_path: Path) -> None:
    (make_run(tmp_path, OLD, [10]) / "notes.txt").write_text("mine")
    prune(SYSTEM_DISK, make_run(tmp_path, NEW, [10]), keep_bytes=0, all_runs=True)
    assert left(tmp_path) == ["20250101/notes.txt", f"20250103/{TRACE_NAME}"]


def test_a_run_makes_room_when_it_starts(tmp_path: Path) -> None:
    make_run(tmp_path, OLD, [1000])
    with LogWriter(real_system(), tmp_path, NEW, segment_bytes=100, keep_bytes=600, keep_all_runs=True):
        assert not (tmp_path / OLD).exists()


def test_the_newest_run_is_the_latest_or_the_last_by_name(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "nothing") is None
    assert newest_run(tmp_path) is None
    make_run(tmp_path, OLD, [10])
    new = make_run(tmp_path, NEW, [10])
    (tmp_path / "zzz").mkdir()
    assert newest_run(tmp_path) == new
    (tmp_path / "latest").symlink_to(OLD)
    assert newest_run(tmp_path) == tmp_path / "latest"
