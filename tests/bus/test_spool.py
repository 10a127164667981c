"""Frames are whole or not there, and damage costs those that it touches."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from eventlm.bus.spool import SpoolWriter, has_lost, read_frames, remove_spool, spool_name
from eventlm.system.disk import SYSTEM_DISK
from tests.world.machine.disk import WorldDisk

BASE = [b"head", b"one reply"]
#: Bodies may hold what frames begin with.
BODIES = [b"first", b"\x89EVS second", b"", b"third" * 20]


def write(folder: Path, first_s: int = 0) -> Path:
    """A spool with these frames; its file."""
    spool = SpoolWriter(SYSTEM_DISK, folder)
    spool.prepare(first_s, BASE)
    if first_s:
        folder.mkdir(parents=True)
        spool.start_file(first_s)
        spool.go_on()
    for body in BODIES:
        spool.append([body])
        assert spool.flush() is None
    spool.close()
    return spool.path


def test_frames_come_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    assert path.name == spool_name(0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert read_frames(SYSTEM_DISK, path) == ([*BASE, *BODIES], 0)


def test_one_that_is_torn_has_the_frames_before(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    content = path.read_bytes()
    whole = [*BASE, *BODIES]
    for num_bytes in range(len(content)):
        path.write_bytes(content[:num_bytes])
        bodies, num_bad_bytes = read_frames(SYSTEM_DISK, path)
        assert bodies == whole[: len(bodies)]
        assert sum(map(len, bodies)) + 16 * len(bodies) + num_bad_bytes == num_bytes


def test_a_flipped_bit_costs_one_frame(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    content = path.read_bytes()
    whole = [*BASE, *BODIES]
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        bodies, num_bad_bytes = read_frames(SYSTEM_DISK, path)
        assert num_bad_bytes > 0
        missing = [body for body in whole if body not in bodies]
        assert len(bodies) == len(whole) - 1
        assert len(missing) == 1


@pytest.mark.parametrize(("run", "name"), [("other", spool_name(0)), ("run", spool_name(7))])
def test_frames_of_another_file_are_no_frames(run: str, name: str, tmp_path: Path) -> None:
    content = write(tmp_path / "run").read_bytes()
    (tmp_path / run).mkdir(exist_ok=True)
    (tmp_path / run / name).write_bytes(content)
    assert read_frames(SYSTEM_DISK, tmp_path / run / name) == ([], len(content))


def test_a_file_replaces_the_one_before(tmp_path: Path) -> None:
    spool = SpoolWriter(SYSTEM_DISK, tmp_path / "run")
    spool.prepare(0, BASE)
    spool.append(BODIES)
    assert spool.flush() is None
    assert spool.num_own_bytes == sum(map(len, BODIES)) + 16 * len(BODIES)
    spool.prepare(0, [b"what lives"])
    spool.start_file(9)
    assert len(list((tmp_path / "run").iterdir())) == 2
    spool.go_on()
    assert spool.num_own_bytes == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == [spool_name(9)]
    assert read_frames(SYSTEM_DISK, spool.path) == ([b"what lives"], 0)
    spool.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_cannot_begin_leaves_the_file_before(tmp_path: Path) -> None:
    spool = SpoolWriter(SYSTEM_DISK, tmp_path / "run")
    spool.prepare(0, BASE)
    assert spool.flush() is None
    # Not even begun.
    spool.prepare(0, [b"of an earlier attempt"])
    for _ in range(2):
        spool.prepare(0, [b"what lives"])
        spool.start_file(9)
        assert read_frames(SYSTEM_DISK, spool.folder / spool_name(9)).bodies == [b"what lives"]
        spool.go_back()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [spool_name(0)]
    spool.append([b"more"])
    assert spool.flush() is None
    assert read_frames(SYSTEM_DISK, spool.path).bodies == [*BASE, b"more"]


def test_what_is_synced_outlives_a_power_failure() -> None:
    world = WorldDisk()
    disk = world.of("engine")
    spool = SpoolWriter(disk, Path("/spools/run"))
    for first_s in (0, 7):
        spool.prepare(0, BASE)
        if first_s:
            spool.start_file(first_s)
            assert spool.sync_next() is None
            spool.go_on()
        spool.append([BODIES[0]])
        assert spool.flush() is None
        assert spool.sync() is None
        with patch.object(WorldDisk, "_keep", lambda self, what, number: [False] * number):
            world.reboot()
        assert read_frames(disk, spool.path) == ([*BASE, BODIES[0]], 0)


def test_a_folder_that_is_not_there_is_removed_all_the_same(tmp_path: Path) -> None:
    remove_spool(SYSTEM_DISK, tmp_path / "run")


def test_a_loss_is_known_until_a_segment_begins_with_all_that_lives(tmp_path: Path) -> None:
    spool = SpoolWriter(SYSTEM_DISK, tmp_path / "run")
    spool.prepare(0, BASE)
    assert spool.flush() is None
    assert not has_lost(SYSTEM_DISK, spool.folder)
    for _ in range(2):
        spool.note_loss()
    assert has_lost(SYSTEM_DISK, spool.folder)
    spool.prepare(0, BASE)
    spool.start_file(9)
    spool.go_on()
    assert not has_lost(SYSTEM_DISK, spool.folder)
