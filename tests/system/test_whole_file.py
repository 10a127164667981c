"""A file that is there as a whole or not at all."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from eventlm.errors import ExitCode, UsageError
from eventlm.system.whole_file import WholeFile, whole_file


def test_it_replaces_the_old_one_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    with whole_file(path) as file:
        file.write(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_it_if_that_is_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        whole = WholeFile(tmp_path / "file", mode=0o666)
    finally:
        os.umask(before)
    whole.finish()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_what_goes_wrong_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half", "whole"])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a folder; name a file with -o"), whole_file(tmp_path):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"cannot write to .*/file/out: .*; choose another"),
        whole_file(tmp_path / "file" / "out"),
    ):
        pass


def test_a_disk_without_room(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with (
            pytest.raises(UsageError, match=f"^cannot write to {path}: File too large; ") as caught,
            whole_file(path) as file,
        ):
            file.write(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == ExitCode.FAILED
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(pipe) as file:
            file.write(b"whole")
        assert os.read(reader, 100) == b"whole"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_device_stays_one_and_its_error_is_told() -> None:
    with (
        pytest.raises(UsageError, match=r"^cannot write to /dev/full: No space left on device; "),
        whole_file(Path("/dev/full")) as file,
    ):
        file.write(bytes(1 << 20))
    assert Path("/dev/full").is_char_device()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with whole_file(tmp_path / "link") as file:
        file.write(b"whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"whole"
