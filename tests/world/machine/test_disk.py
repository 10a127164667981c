"""The simulated disk behaves like the host's, each fault occurs, and the same draws give the same faults."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from eventlm.system.disk import SYSTEM_DISK, Disk, FileStatus
from tests.world.machine.disk import MEMORY, WorldDisk
from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.drawn_disk import ALL_FAULTS, Drawn
from tests.world.machine.file_tree import PAGE_BYTES

_Call = tuple[str, Callable[[], object]]


class Operations:
    """Random calls into a disk. Results contain only what all disks agree on. The same seed makes the same calls."""

    def __init__(self, seed: int, disk: Disk, folder: Path) -> None:
        self._rng = random.Random(seed)
        self._disk = disk
        self._folder = folder
        self._files: list[Any] = []

    def _path(self) -> Path:
        """A path below the folder: link targets never lead upwards, and only a name follows `..`."""
        rng = self._rng
        parts = [rng.choice("abcd") for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if rng.random() < 0.1:
            parts += ["..", rng.choice("abcd")]
        return self._folder.joinpath(*parts)

    def next(self) -> tuple[str, object]:
        """Make the next call. Returns its name and its result or error."""
        name, call = self._draw_call()
        try:
            return name, call()
        except OSError as error:
            return name, (type(error), error.errno)

    def _draw_call(self) -> _Call:
        rng, disk, path, other = self._rng, self._disk, self._path(), self._path()
        target = rng.choice((other.name, f"{rng.choice('abcd')}/{other.name}", str(self._folder / other.name)))
        calls: list[_Call] = [
            *2 * [("create", lambda: self._keep(disk.create(path)))],
            ("append", lambda: self._keep(disk.append(path))),
            ("open", lambda: self._keep(disk.open(path))),
            ("status", lambda: _comparable(disk.status(path))),
            ("list", lambda: sorted(disk.list(path))),
            ("is_link", lambda: disk.is_link(path)),
            ("resolve", lambda: self._resolve(path)),
            ("is_writable", lambda: disk.is_writable(path)),
            *2 * [("make_folder", lambda: disk.make_folder(path))],
            ("make_folders", lambda: disk.make_folders(path)),
            ("link", lambda: disk.link(path, other)),
            (f"symlink to {target}", lambda: disk.symlink(target, path)),
            *2 * [("rename", lambda: disk.rename(path, other))],
            ("unlink", lambda: disk.unlink(path)),
            ("remove_folder", lambda: disk.remove_folder(path)),
            ("sync_folder", lambda: disk.sync_folder(path)),
            ("same", lambda: self._are_same(path, other)),
        ]
        if self._files and rng.random() < 0.5:
            calls = self._calls_of(rng.choice(self._files))
        name, call = rng.choice(calls)
        return f"{name} {path} {other}", call

    def _calls_of(self, file: Any) -> list[_Call]:
        rng = self._rng
        size = rng.choice((0, 1, 10, 10, 100, 100, PAGE_BYTES, 3 * PAGE_BYTES, 300_000))
        content = rng.randbytes(size).replace(b"\0", b"\n")
        shared: list[_Call] = [
            ("close", lambda: self._close(file)),
            ("file status", lambda: _comparable(file.status())),
        ]
        if hasattr(file, "sync"):
            return [
                *shared,
                *2 * [(f"write {size}", lambda: file.write(content))],
                (f"truncate {size}", lambda: file.truncate(size)),
                ("sync", file.sync),
            ]
        return [
            *shared,
            (f"read {size}", lambda: file.read(size)),
            (f"readline {size}", lambda: file.readline(1 + size)),
            (f"seek {size}", lambda: file.seek(size)),
            ("tell", file.tell),
            ("is_locked", file.is_locked),
        ]

    def _keep(self, file: Any) -> object:
        self._files.append(file)
        return "a file"

    def _close(self, file: Any) -> None:
        self._files.remove(file)
        file.close()
        file.close()

    def _resolve(self, path: Path) -> object:
        """Where links form a circle, what the host returns or raises depends on the version of Python."""
        for each in (path, *path.parents):
            try:
                self._disk.list(each)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return "a circle"
        try:
            return str(self._disk.resolve(path))
        except (OSError, RuntimeError):
            return "a circle"

    def _are_same(self, path: Path, other: Path) -> bool:
        statuses = self._disk.status(path), self._disk.status(other)
        return None not in statuses and statuses[0].identity == statuses[1].identity  # type: ignore[union-attr]

    def contents(self) -> dict[str, object]:
        """All that can be found below the folder, by path."""
        found: dict[str, object] = {}
        folders = [self._folder]
        while folders:
            folder = folders.pop()
            for path in (folder / name for name in sorted(self._disk.list(folder))):
                status = self._disk.status(path)
                if self._disk.is_link(path):
                    found[str(path)] = "a link"
                elif status is not None and status.is_folder:
                    folders.append(path)
                    found[str(path)] = "a folder"
                else:
                    found[str(path)] = read(self._disk, path)
        return found

    def close(self) -> None:
        for file in self._files:
            file.close()


def _comparable(status: FileStatus | None) -> object:
    if status is None or not status.is_file:
        return status and status.is_folder
    return status.num_bytes, status.is_file, status.is_folder


def read(disk: Disk, path: Path) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        return file.read(1 << 30)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_give_what_the_hosts_disk_gives(tmp_path: Path, seed: int) -> None:
    for run in range(5):
        folder = tmp_path / str(run)
        disk = WorldDisk()
        both = [Operations(100 * seed + run, each, folder) for each in (SYSTEM_DISK, disk.of("engine"))]
        SYSTEM_DISK.make_folder(folder)
        disk.of("engine").make_folders(folder)
        for number in range(200):
            host, world = (operations.next() for operations in both)
            assert host == world, number
        host_contents, world_contents = (operations.contents() for operations in both)
        assert host_contents == world_contents
        for operations in both:
            operations.close()
        assert disk.open_files("engine") == []


@pytest.mark.parametrize("disk", [SYSTEM_DISK, WorldDisk().of("engine")], ids=["host", "world"])
def test_a_path_may_lead_through_40_links(disk: Disk, tmp_path: Path) -> None:
    disk.make_folders(tmp_path)
    disk.make_folder(tmp_path / "0")
    for number in range(41):
        disk.symlink(str(number), tmp_path / str(number + 1))
    assert disk.list(tmp_path / "40") == []
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        disk.list(tmp_path / "41")


def test_a_synced_folder_keeps_its_names_and_what_they_come_after() -> None:
    disk = WorldDisk()
    own = disk.of("engine")
    for name in "ab":
        own.make_folder(Path("/", name))
    disk.write_back()
    for name in ("/a/1", "/a/2", "/b/4"):
        own.create(Path(name)).close()
    own.rename(Path("/a/1"), Path("/b/3"))
    own.rename(Path("/a/2"), Path("/a/5"))
    own.sync_folder(Path("/b"))
    disk.tree.reboot(lambda number: [False] * number, lambda number: [False] * number)
    assert (own.list(Path("/a")), own.list(Path("/b"))) == ([], ["4", "3"])


def history(seed: int, left_out: set[tuple[str, int]] | None = None) -> tuple[list[tuple[str, int]], str]:
    """Run two processes with all faults on. Returns the faults that struck, and a digest of everything seen."""
    world = Drawn(seed)
    world.left_out = left_out or set()
    disk, folder, seen = WorldDisk(world), Path("/data"), blake2b()
    disk.of("engine").make_folder(folder)
    for boot in range(6):
        disk.faults = ALL_FAULTS._replace(capacity=400_000 if boot % 2 else None, has_links=boot % 3 > 0)
        both = [Operations(10 * seed + boot, disk.of(process), folder) for process in ("engine", "front end")]
        for number in range(200):
            if number == 190:
                disk.faults = disk.faults._replace(is_read_only=True)
            seen.update(repr(both[number % 2].next()).encode())
            seen.update(repr(both[0]._disk.status(folder)).encode())
        disk.crash("front end")
        disk.faults = DiskFaults()
        disk.reboot()
        disk.of("engine").make_folders(folder)
        seen.update(repr(both[0].contents()).encode())
    seen.update(repr((world.happened, world.spent_ns, world.calls)).encode())
    return world.happened, seen.hexdigest()


def test_each_fault_happens_and_is_counted() -> None:
    happened = {what for seed in range(6) for what, _ in history(seed)[0]}
    changes = ["create", "link", "make_folder", "make_folders", "rename", "remove_folder", "symlink", "truncate"]
    changes += ["unlink", "write"]
    assert happened >= {f"error of {name}" for name in [*changes, "sync", "sync_folder"]}
    assert happened >= {f"slow {name}" for name in [*changes, "open", "list", "read", "close", "sync", "status"]}
    assert happened >= {"bit rot", "full", "lost names", "lost pages", "no links", "read-only", "short write"}
    assert any(what.startswith("no room to ") for what in happened)


def test_a_disk_without_faults_has_none() -> None:
    world = Drawn(1)
    operations = Operations(1, WorldDisk(world).of("engine"), Path("/"))
    for _ in range(300):
        operations.next()
    assert not world.happened
    assert not world.spent_ns


def test_the_same_draws_give_the_same_in_a_process_with_another_hash_seed() -> None:
    here = [history(seed) for seed in range(3)]
    assert len({digest for _, digest in here}) == 3
    program = "from tests.world.machine.test_disk import history; print([history(seed) for seed in range(3)])"
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert there.stdout == f"{here}\n"


def test_a_fault_that_is_left_out_moves_no_other_before_it_and_draws_none_anew() -> None:
    happened, digest = history(4)
    drawn = [fault for fault in happened if fault[0].startswith(("error of ", "slow ", "short "))]
    for fault in drawn[:: len(drawn) // 5]:
        without, _ = history(4, {fault})
        index = happened.index(fault)
        assert without[:index] == happened[:index]
        assert fault not in without
    # A slow call differs only in the time that it takes.
    slow = next(fault for fault in happened if fault[0] == "slow status")
    without, other_digest = history(4, {slow})
    assert without == [fault for fault in happened if fault != slow]
    assert other_digest != digest


def test_what_is_in_memory_outlives_processes_but_no_reboot_and_does_not_fail() -> None:
    disk = WorldDisk()
    disk.faults = DiskFaults(is_read_only=True)
    own = disk.of("engine")
    own.make_folders(MEMORY / "own")
    own.create(MEMORY / "own" / "spool").write(b"text")
    disk.crash("engine")
    assert disk.of("engine 2").read(MEMORY / "own" / "spool") == b"text"
    disk.reboot()
    assert own.list(MEMORY) == []
    assert disk.tree.files() == []
