"""A folder of this user alone, and a board that outlives those who write on it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eventlm.system import shared_folder
from eventlm.system.shared_folder import NO_STEP, SharedFolder, StepBoard, SystemSharedFolders

KILLED = """
import os, signal, sys
from eventlm.system import shared_folder
from eventlm.system.shared_folder import StepBoard
StepBoard(sys.argv[1]).write(2, 77)
os.kill(os.getpid(), signal.SIGKILL)
"""
#: Its child goes on, with whatever can be inherited.
LEFT = """
import os, signal, subprocess, sys
from pathlib import Path
from eventlm.system import shared_folder
shared_folder._MEMORY = Path(sys.argv[1])
folder = shared_folder.SharedFolder()
(folder.path / "part").write_bytes(b"1")
child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(folder.path, child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_private_and_goes_with_all_that_is_in_it() -> None:
    folder = SharedFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    other = SharedFolder()
    assert folder.path != other.path
    other.remove()
    (folder.path / "part").write_bytes(b"1")
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_another_process_can_remove_it() -> None:
    folders = SystemSharedFolders()
    folder = folders.make()
    board = folders.board(folder.path, size=2)
    folders.remove(folder.path)
    folders.remove(str(folder.path))
    assert not folder.path.exists()
    board.write(1, 5)
    assert board.read(1) == 5
    board.close()
    folder.remove()


def test_without_a_file_system_in_memory_it_is_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_MEMORY", tmp_path / "none")
    folder = SharedFolder()
    assert folder.path.is_dir()
    folder.remove()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(shared_folder, "_MEMORY", folder)
    return folder


@pytest.fixture
def left(memory: Path) -> Iterator[Path]:
    """A folder whose maker was killed."""
    killed = subprocess.run([sys.executable, "-c", LEFT, str(memory)], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    path, child = killed.stdout.split()
    assert (Path(path) / "part").exists()
    yield Path(path)
    os.kill(int(child), signal.SIGKILL)


def test_the_next_folder_removes_those_of_makers_that_were_killed(memory: Path, left: Path) -> None:
    mine, other = SharedFolder(), SharedFolder()
    assert sorted(memory.iterdir()) == sorted([mine.path, other.path])
    mine.remove()
    other.remove()


def test_one_whose_maker_was_killed_before_it_was_locked_is_removed_later(memory: Path) -> None:
    old, new = (memory / f"new-{shared_folder.PREFIX}{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    shared_folder.remove_left_folders(memory)
    assert list(memory.iterdir()) == [new]


def test_nothing_else_is_removed(memory: Path, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = left.rename(tmp_path / left.name)
    left.symlink_to(elsewhere)
    (memory / f"{shared_folder.PREFIX}file").touch()
    os.mkfifo(memory / f"{shared_folder.PREFIX}pipe")
    (memory / "eventlm-something").mkdir()
    before = sorted(memory.iterdir())
    shared_folder.remove_left_folders(memory)
    assert sorted(memory.iterdir()) == before
    assert (elsewhere / "part").exists()
    # Another user's.
    monkeypatch.setattr("os.geteuid", lambda: elsewhere.stat().st_uid + 1)
    shared_folder.remove_left_folders(tmp_path)
    assert (elsewhere / "part").exists()
    monkeypatch.undo()
    shared_folder.remove_left_folders(tmp_path)
    assert not elsewhere.exists()


def test_no_folder_is_removed_by_those_who_make_others_meanwhile(memory: Path) -> None:
    def make(number: int) -> None:
        for _ in range(100):
            folder = SharedFolder()
            StepBoard(folder.path, size=1).close()
            assert list(folder.path.iterdir())
            folder.remove()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    assert list(memory.iterdir()) == []


def test_a_board_says_what_a_process_that_was_killed_had_in_hand(tmp_path: Path) -> None:
    board = StepBoard(tmp_path, size=4)
    assert [board.read(number) for number in range(4)] == [NO_STEP] * 4
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    assert [board.read(number) for number in range(4)] == [NO_STEP, NO_STEP, 77, NO_STEP]
    board.close()


def test_the_lasting_folder_is_one_of_this_user() -> None:
    assert SystemSharedFolders().lasting == Path(f"/dev/shm/eventlm-{os.getuid()}")
