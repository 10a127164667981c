"""What a simulated disk loses when a process or the machine goes down, and how calls fail."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from eventlm.system.disk import Disk
from tests.bus.crashes import Killed
from tests.world.machine.disk import ProcessDisk, WorldDisk
from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.drawn_disk import Drawn, Mortal
from tests.world.machine.file_tree import PAGE_BYTES


def read(disk: Disk, path: Path) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        return file.read(1 << 30)


@pytest.fixture
def world() -> Drawn:
    return Drawn(7)


@pytest.fixture
def disk(world: Drawn) -> WorldDisk:
    return WorldDisk(world)


@pytest.fixture
def engine(disk: WorldDisk) -> ProcessDisk:
    return disk.of("engine")


def test_a_crash_closes_files_and_releases_locks_and_loses_nothing(disk: WorldDisk, engine: ProcessDisk) -> None:
    path, other = Path("/file"), disk.of("front end")
    file, reader = engine.create(path), other.open(path)
    file.write(b"written")
    assert reader.is_locked()
    with pytest.raises(BlockingIOError):
        other.append(path)
    assert disk.open_files("engine") == disk.open_files("front end") == [path]
    disk.crash("engine")
    assert disk.open_files("engine") == []
    assert not reader.is_locked()
    assert reader.read(10) == b"written"
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(b"more")
    other.append(path).close()


def test_what_was_synced_outlives_reboots_and_what_was_not_may_be_lost_in_any_part() -> None:
    pages = [bytes([number]) * PAGE_BYTES for number in range(1, 7)]
    left = set()
    for seed in range(300):
        disk = WorldDisk(Drawn(seed))
        path, engine = Path("/file"), disk.of("engine")
        file = engine.create(path)
        disk.write_back()
        file.write(b"".join(pages[:2]) + b"half")
        file.sync()
        file.write(b"".join(pages[2:]))
        disk.reboot()
        found = read(engine, path)
        durable = b"".join(pages[:2]) + b"half"
        assert found[: len(durable)] == durable
        whole = durable + b"".join(pages[2:])
        assert len(found) <= len(whole)
        pieces = range(2 * PAGE_BYTES, len(found), PAGE_BYTES)
        kept = tuple(found[at : at + PAGE_BYTES] == whole[at : at + PAGE_BYTES] for at in pieces)
        for at, is_kept in zip(pieces, kept, strict=True):
            assert is_kept or not found[max(at, len(durable)) : at + PAGE_BYTES].strip(b"\0")
        left.add(kept)
        disk.reboot()
        assert read(engine, path) == found
    assert {(False,), (True,) * 5, (True, True)} < left
    assert any(True in kept[kept.index(False) :] for kept in left if False in kept)
    assert len(left) > 20


def test_a_file_that_was_cut_is_long_again_after_a_reboot_or_it_is_not() -> None:
    found = set()
    for seed in range(300):
        disk = WorldDisk(Drawn(seed))
        path, engine = Path("/file"), disk.of("engine")
        file = engine.create(path)
        file.write(b"1234567" * PAGE_BYTES)
        disk.write_back()
        file.truncate(PAGE_BYTES + 5)
        file.sync()
        file.write(b"cut off" * PAGE_BYTES)
        file.truncate(3)
        if seed % 2:
            file.write(b"end")
        disk.reboot()
        found.add(read(engine, path))
    whole = (b"1234567" * PAGE_BYTES)[: PAGE_BYTES + 5]
    # Pages that were truncated before they were written are gone.
    assert found == {whole, whole[:3], whole[:3] + b"end", whole[:3] + b"end" + whole[6:], whole[:6]}


def test_an_error_of_sync_loses_for_good_what_was_dirty(disk: WorldDisk, engine: ProcessDisk, world: Drawn) -> None:
    path = Path("/file")
    file = engine.create(path)
    disk.write_back()
    disk.faults = DiskFaults(sync_errors=1)
    file.write(b"lost" * PAGE_BYTES)
    with pytest.raises(OSError, match="Input/output error"):
        file.sync()
    disk.faults = DiskFaults()
    file.write(b"kept" * PAGE_BYTES)
    file.sync()
    assert read(engine, path) == b"lost" * PAGE_BYTES + b"kept" * PAGE_BYTES
    disk.reboot()
    assert read(engine, path) == bytes(4 * PAGE_BYTES) + b"kept" * PAGE_BYTES
    assert world.faults["error of sync"] == 1


def test_a_rename_is_whole_or_has_not_happened() -> None:
    seen = set()
    for seed in range(60):
        disk = WorldDisk(Drawn(seed))
        engine = disk.of("engine")
        for name in ("old", "new"):
            file = engine.create(Path("/") / name)
            file.write(name.encode())
        disk.write_back()
        engine.rename(Path("/new"), Path("/old"))
        engine.symlink("old", Path("/link"))
        engine.unlink(Path("/link"))
        disk.reboot()
        contents = {name: read(engine, Path("/") / name) for name in engine.list(Path("/"))}
        assert contents in ({"old": b"old", "new": b"new"}, {"old": b"new"}) or contents.pop("link") == contents["old"]
        seen.add(tuple(contents))
    assert seen == {("old", "new"), ("old",)}


def test_names_are_lost_in_any_subset_until_they_are_written_back() -> None:
    seen = set()
    for seed in range(200):
        disk = WorldDisk(Drawn(seed))
        engine = disk.of("engine")
        engine.make_folder(Path("/kept"))
        disk.write_back()
        for name in ("a", "b", "c"):
            engine.create(Path("/kept") / name).sync()
        disk.reboot()
        seen.add(tuple(engine.list(Path("/kept"))))
    assert len(seen) == 8


def test_a_full_disk_takes_what_it_has_room_for_and_then_nothing(disk: WorldDisk, engine: ProcessDisk) -> None:
    path = Path("/file")
    disk.faults = DiskFaults(capacity=10)
    file = engine.create(path)
    assert file.write(b"1234567") == 7
    assert file.write(b"1234567") == 3
    with pytest.raises(OSError, match="No space left on device"):
        file.write(b"1")
    file.truncate(4)
    assert file.write(b"1") == 1
    engine.unlink(path)
    # A file that has no name but is open still takes up room.
    other = engine.create(path)
    assert other.write(b"0123456789") == 5
    file.close()
    assert other.write(b"0123456789") == 5


def test_a_disk_that_cannot_be_written_can_be_read(disk: WorldDisk, engine: ProcessDisk) -> None:
    folder, path = Path("/folder"), Path("/folder/file")
    engine.make_folder(folder)
    file = engine.create(path)
    file.write(b"content")
    disk.faults = DiskFaults(is_read_only=True)
    for change in (
        lambda: file.write(b"1"),
        lambda: file.truncate(0),
        lambda: engine.append(path),
        lambda: engine.create(folder / "new"),
        lambda: engine.make_folder(folder / "new"),
        lambda: engine.make_folders(folder / "new" / "newer"),
        lambda: engine.symlink("file", folder / "new"),
        lambda: engine.link(path, folder / "new"),
        lambda: engine.rename(path, folder / "new"),
        lambda: engine.unlink(path),
        lambda: engine.remove_folder(folder),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    engine.make_folders(folder)
    assert not engine.is_writable(folder)
    assert read(engine, path) == b"content"


def test_one_bit_of_the_medium_rots(disk: WorldDisk, engine: ProcessDisk) -> None:
    path, content = Path("/file"), bytes(range(200))
    file = engine.create(path)
    file.write(content)
    file.sync()
    disk.faults = DiskFaults(bit_rot=1)
    found = read(engine, path)
    disk.faults = DiskFaults()
    assert read(engine, path) == found
    assert sum((one ^ other).bit_count() for one, other in zip(content, found, strict=True)) == 1


def test_a_slow_call_takes_time(world: Drawn, disk: WorldDisk, engine: ProcessDisk) -> None:
    disk.faults = DiskFaults(slow=1, most_slow_ns=1000)
    for _ in range(10):
        engine.list(Path("/"))
    assert 1000 < world.spent_ns <= 10_000
    assert world.faults == {"slow list": 10}


@pytest.mark.parametrize("when", ["before", "halfway", "after"])
def test_a_process_dies_before_halfway_through_or_after_a_call(when: str) -> None:
    mortal = Mortal(5, 1, when)
    disk = WorldDisk(mortal)
    with pytest.raises(Killed):
        disk.of("engine").make_folders(Path("/a/b/c"))
    other = disk.of("other")
    found = [path for path in ("/a", "/a/b", "/a/b/c") if other.status(Path(path))]
    assert found == {"before": [], "halfway": ["/a"], "after": ["/a", "/a/b", "/a/b/c"]}[when]
    assert mortal.calls == ["make_folders"]
    with pytest.raises(Killed):
        disk.of("engine").list(Path("/"))
