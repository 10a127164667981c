from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventlm.bus.appended_file import AppendedFile
from eventlm.system.disk import SYSTEM_DISK


def test_pieces_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile(SYSTEM_DISK, tmp_path / "file")
    assert file.append([b"one", b"two"]) == (2, None)
    write, room = os.write, iter([4])

    def fill_up(fd: int, content: bytes) -> int:
        try:
            return write(fd, content[: next(room)])
        except StopIteration:
            raise OSError("No space left on device") from None

    monkeypatch.setattr("eventlm.system.disk.os.write", fill_up)
    num_pieces, error = file.append([b"33", b"4444"])
    assert (num_pieces, str(error)) == (1, "No space left on device")
    assert (tmp_path / "file").read_bytes() == b"onetwo33"
    assert file.num_bytes == 8


def test_one_that_is_there_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one")
    file = AppendedFile(SYSTEM_DISK, tmp_path / "file", file=SYSTEM_DISK.append(tmp_path / "file"), num_bytes=3)
    file.append([b"two"])
    file.close()
    assert (tmp_path / "file").read_bytes() == b"onetwo"


def test_what_a_failed_sync_leaves_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile(SYSTEM_DISK, tmp_path / "file")
    file.append([b"one"])
    assert file.sync() is None
    assert file.is_synced
    file.append([b"two"])

    def fail(fd: int) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr("eventlm.system.disk.os.fdatasync", fail)
    assert file.sync() is not None
    assert (tmp_path / "file").read_bytes() == b"one"
