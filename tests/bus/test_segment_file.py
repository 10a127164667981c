from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from eventlm.bus.segment_file import Extent, SegmentFile
from eventlm.events.codec import chain, close_line
from eventlm.system.disk import SYSTEM_DISK

BODIES = [b'{"t":"a","s":%d' % number for number in range(3)]


def lines(bodies: list[bytes], previous_h: str = "") -> tuple[list[bytes], list[str]]:
    """Complete lines and their hashes."""
    closed, hashes = [], []
    for body in bodies:
        previous_h = chain(previous_h, body)
        hashes.append(previous_h)
        closed.append(close_line(body, previous_h))
    return closed, hashes


class FullDisk:
    """`os.write` on a disk with room for some more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr("eventlm.system.disk.os.write", self.write)

    def write(self, fd: int, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= (num_bytes := self._write(fd, content[: self.room]))
        return num_bytes


def test_lines_are_appended_and_chained(tmp_path: Path) -> None:
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    closed, hashes = lines(BODIES)
    assert file.write(BODIES[:2]) is None
    assert file.written == Extent(2, len(closed[0]) + len(closed[1]), hashes[1])
    file.begin()
    assert file.num_own_bytes == 0
    assert file.write(BODIES[2:]) is None
    assert file.written == Extent(3, sum(map(len, closed)), hashes[2])
    assert file.num_own_bytes == len(closed[2])
    file.close()
    assert (tmp_path / "t").read_bytes() == b"".join(closed)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(FileExistsError):
        SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    assert (tmp_path / "t").read_text() == "mine"


def test_the_lock_lasts_as_long_as_the_file(tmp_path: Path) -> None:
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    with contextlib.closing(SYSTEM_DISK.open(tmp_path / "t")) as reader:
        assert reader.is_locked()
        file.close()
        assert not reader.is_locked()
    file.close()


@pytest.mark.parametrize(("num_whole", "more"), [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (2, 0), (3, -1)])
def test_of_a_failed_write_the_whole_lines_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_whole: int, more: int
) -> None:
    closed, hashes = lines(BODIES)
    room = sum(map(len, closed[:num_whole])) + more
    num_kept = num_whole - (more < 0)
    disk = FullDisk(monkeypatch, room)
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    error = file.write(BODIES)
    assert error is not None
    assert error.errno == errno.ENOSPC
    kept = b"".join(closed[:num_kept])
    assert file.written == (num_kept, len(kept), hashes[num_kept - 1] if num_kept else "")
    assert (tmp_path / "t").read_bytes() == kept
    # And it goes on from there.
    disk.room = 1 << 20
    assert file.write(BODIES[num_kept:]) is None
    file.close()
    assert (tmp_path / "t").read_bytes() == b"".join(closed)


def test_half_a_line_that_could_not_be_cut_is_cut_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, _ = lines(BODIES)
    FullDisk(monkeypatch, len(closed[0]) + 5)
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    with monkeypatch.context() as patch:

        def refuse(fd: int, length: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr("eventlm.system.disk.os.ftruncate", refuse)
        assert file.write(BODIES) is not None
        assert file.written.num_lines == 1
        assert (tmp_path / "t").stat().st_size == len(closed[0]) + 5
        with pytest.raises(OSError, match="Input/output error"):
            file.truncate()
    file.truncate()
    assert (tmp_path / "t").read_bytes() == closed[0]
    file.close()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_closed_segment_gets_its_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr("eventlm.system.disk.os.link", refuse)
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    file.write(BODIES)
    for _ in range(2):
        file.close_as(tmp_path / "closed")
    assert (tmp_path / "t").exists() == has_links
    assert (tmp_path / "closed").read_bytes() == b"".join(lines(BODIES)[0])
    file.close()


def test_a_closed_segment_never_replaces_another_file(tmp_path: Path) -> None:
    (tmp_path / "closed").write_text("another")
    file = SegmentFile(SYSTEM_DISK, tmp_path / "t", first_s=0)
    with pytest.raises(FileExistsError):
        file.close_as(tmp_path / "closed")
    file.rename(tmp_path / "renamed")
    assert file.path == tmp_path / "renamed"
    file.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]
    assert (tmp_path / "closed").read_text() == "another"
