"""A folder of this user alone, and a board that outlives those who write on it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.system import shared_folder
from eventlm.system.shared_folder import NO_STEP, SharedFolder, StepBoard

KILLED = """
import os, signal, sys
from eventlm.system import shared_folder
from eventlm.system.shared_folder import StepBoard
StepBoard(sys.argv[1]).write(2, 77)
os.kill(os.getpid(), signal.SIGKILL)
"""
LEFT = """
import os, signal, sys
from pathlib import Path
from eventlm.system import shared_folder
shared_folder._MEMORY = Path(sys.argv[1])
print(shared_folder.SharedFolder().path, end="", flush=True)
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


def test_without_a_file_system_in_memory_it_is_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_MEMORY", tmp_path / "none")
    folder = SharedFolder()
    assert folder.path.is_dir()
    folder.remove()


def test_the_next_folder_removes_those_of_makers_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_MEMORY", tmp_path)
    mine = SharedFolder()
    killed = subprocess.run([sys.executable, "-c", LEFT, str(tmp_path)], check=False, capture_output=True, text=True)
    left = Path(killed.stdout)
    assert left.is_dir()
    (tmp_path / "eventlm-without-owner").mkdir()
    other = SharedFolder()
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other.path, tmp_path / "eventlm-without-owner"])


def test_a_board_says_what_a_process_that_was_killed_had_in_hand(tmp_path: Path) -> None:
    board = StepBoard(tmp_path, size=4)
    assert [board.read(number) for number in range(4)] == [NO_STEP] * 4
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    assert [board.read(number) for number in range(4)] == [NO_STEP, NO_STEP, 77, NO_STEP]
    board.close()
