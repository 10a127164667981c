"""The simulated disk does what the host's does, loses what a power failure loses, and can fail in each way."""

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

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events.codec import encode_body
from eventlm.system.disk import SYSTEM_DISK, Disk, FileStatus
from eventlm.system.system import real_system
from tests.bus import traces
from tests.bus.crashes import Killed
from tests.world.disk import DiskFaults, ProcessDisk, Surroundings, WorldDisk
from tests.world.file_tree import PAGE_BYTES

ALL_FAULTS = DiskFaults(errors=12, sync_errors=4, short_writes=4, slow=9, bit_rot=4)


_Call = tuple[str, Callable[[], object]]


class Drawn(Surroundings):
    """Draws by a hash. spent_ns: by slow calls; left_out: of these names and numbers nothing is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.spent_ns = 0
        self.left_out: set[tuple[str, int]] = set()
        self.happened: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self._seed = seed

    def unix_ns(self) -> int:
        return len(self.calls)

    def draw(self, what: str, number: int) -> int:
        if (what, number) in self.left_out:
            return 1
        return int.from_bytes(blake2b(f"{self._seed} {what} {number}".encode(), digest_size=8).digest())

    def fault(self, what: str, number: int) -> None:
        super().fault(what, number)
        self.happened.append((what, number))

    def spend(self, ns: int) -> None:
        self.spent_ns += ns

    def before_call(self, process: str, name: str, path: Path) -> bool:
        self.calls.append(name)
        return False


class Mortal(Drawn):
    """Kills the process around the call of this number: before, halfway through or after it."""

    def __init__(self, seed: int, call: int, when: str) -> None:
        super().__init__(seed)
        self._call = call
        self._when = when
        self.is_dead = False

    def before_call(self, process: str, name: str, path: Path) -> bool:
        if self.is_dead:
            raise Killed
        super().before_call(process, name, path)
        self.is_dead = len(self.calls) == self._call
        if self.is_dead and self._when == "before":
            raise Killed
        return self.is_dead and self._when == "halfway"

    def after_call(self, process: str, name: str, path: Path) -> None:
        if self.is_dead:
            raise Killed


class Operations:
    """Random calls into a disk. Results are those that all disks agree on; the same seed makes the same calls."""

    def __init__(self, seed: int, disk: Disk, folder: Path) -> None:
        self._rng = random.Random(seed)
        self._disk = disk
        self._folder = folder
        self._files: list[Any] = []

    def _path(self) -> Path:
        """Below the folder, as no target of a link leads up and nothing follows `..` but a name."""
        rng = self._rng
        parts = [rng.choice("abcd") for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if rng.random() < 0.1:
            parts += ["..", rng.choice("abcd")]
        return self._folder.joinpath(*parts)

    def next(self) -> tuple[str, object]:
        """A call and what it came to."""
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
        """Where links go in circles, what the host gives or raises depends on the version of Python."""
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
        """All that can be found below the folder, by its path."""
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


def history(seed: int, left_out: set[tuple[str, int]] | None = None) -> tuple[list[tuple[str, int]], str]:
    """Operations of two processes under all faults: what has gone wrong, and a digest of all that was seen."""
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
    assert happened >= {f"error of {name}" for name in [*changes, "sync"]}
    assert happened >= {f"slow {name}" for name in [*changes, "open", "list", "read", "close", "sync", "status"]}
    assert happened >= {"bit rot", "full", "lost names", "lost pages", "no links", "read-only", "short write"}
    assert happened >= {f"no room to {name}" for name in ("create", "make_folder")}


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
    program = "from tests.world.test_disk import history; print([history(seed) for seed in range(3)])"
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
    for fault in happened[:: len(happened) // 5]:
        without, _ = history(4, {fault})
        index = happened.index(fault)
        assert without[:index] == happened[:index]
        assert fault not in without
    # A slow call changes nothing but the time.
    slow = next(fault for fault in happened if fault[0] == "slow status")
    without, other_digest = history(4, {slow})
    assert without == [fault for fault in happened if fault != slow]
    assert other_digest != digest


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
    assert {(False,), (True,) * 5, (True, True), (False, False, False, True)} < left
    assert len(left) > 20


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
    file.close()
    assert engine.create(path).write(b"0123456789") == 10


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


def record(disk: ProcessDisk, made: list[Any], on_flush: Callable[[int], None]) -> None:
    """Write a trace over a disk, and say how many events each flush has written."""
    with LogWriter(real_system()._replace(disk=disk), Path("/runs"), "run") as writer:
        for number, event in enumerate(made):
            writer.append(encode_body(event))
            if number % 3 == 0:
                writer.flush()
                on_flush(writer.num_events)


def read_log(disk: Disk, made: list[Any]) -> tuple[int, str]:
    """How many lines can be read, which are the first that were written, and what the reader says of the end."""
    num_lines = 0
    try:
        with LogReader(Path("/runs/run/trace.jsonl"), disk=disk) as reader:
            for line, event in zip(reader, made, strict=False):
                assert line.body == encode_body(event)
                num_lines += 1
            return num_lines, "torn" if reader.torn else "end" if reader.clean_end else "killed"
    except TraceCorruptError:
        return num_lines, "damaged"
    except UsageError:
        return 0, "nothing"


def test_a_writer_that_dies_around_any_call_leaves_what_it_has_flushed() -> None:
    made, ends = traces.events(14), set()
    for when in ("before", "halfway", "after"):
        for call in range(1, 100):
            world, flushed = Mortal(call, call, when), [0]
            disk = WorldDisk(world)
            with contextlib.suppress(Killed):
                record(disk.of("engine"), made, flushed.append)
                break
            disk.crash("engine")
            world.is_dead = False
            num_lines, end = read_log(disk.of("reader"), made)
            assert flushed[-1] <= num_lines <= flushed[-1] + 3, (when, call)
            ends.add(end)
        assert 10 < call < 99
    assert ends == {"nothing", "damaged", "torn", "killed", "end"}


def test_after_a_reboot_a_trace_has_its_first_lines_and_a_damaged_end_is_told() -> None:
    made, ends = traces.events(120, rows=60, seed=2), []
    for seed in range(150):
        world = Drawn(seed)
        disk = WorldDisk(world)
        end_at, saved_at = world.draw("end", 0) % 120, world.draw("saved", 0) % 120
        saved = 0

        def at_flush(num_events: int, disk: WorldDisk = disk, end_at: int = end_at, saved_at: int = saved_at) -> None:
            nonlocal saved
            if num_events <= saved_at:
                disk.write_back()
                saved = num_events
            if num_events >= end_at:
                raise Killed

        with contextlib.suppress(Killed, OSError):
            record(disk.of("engine"), made, at_flush)
        disk.reboot()
        num_lines, end = read_log(disk.of("reader"), made)
        assert num_lines >= saved
        ends.append(end)
    assert set(ends) >= {"nothing", "damaged", "torn", "killed"}


def test_under_faults_a_trace_that_is_closed_has_whole_lines() -> None:
    made, counts = traces.events(60, rows=20), set()
    for seed in range(40):
        world = Drawn(seed)
        disk = WorldDisk(world)

        def at_flush(_: int, disk: WorldDisk = disk) -> None:
            disk.faults = ALL_FAULTS._replace(bit_rot=0, capacity=30_000)

        record(disk.of("engine"), made, at_flush)
        assert disk.open_files("engine") == []
        disk.faults = DiskFaults()
        num_lines, end = read_log(disk.of("reader"), made)
        if world.faults["error of truncate"] == 0:
            assert end in ("killed", "end"), seed
        counts.add(num_lines)
    assert len(counts) > 5
