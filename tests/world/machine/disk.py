"""The disk of a simulated host, and everything that may go wrong with it.

Each process gets the disk from `WorldDisk.of`. What a process writes survives its end (`crash`), but not that of the
machine (`reboot`), unless `sync` has brought the contents to the medium, and `sync_folder` the names. `write_back`
does both for everything; the world calls it every so often, as a kernel would.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eventlm.system.disk import READ_BUFFER_BYTES, FileStatus
from tests.world.machine.disk_faults import DiskFaults, Surroundings
from tests.world.machine.file_tree import File, FileTree, Folder, Link, Node, error_of, keep_all

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_DEVICE = 1
#: Where the file system in the host's memory is.
MEMORY = Path("/dev/shm")

#: Calls that change nothing, and `thread`, which counts the slow calls of threads.
_LOOKS = ("status", "file status", "list", "is_link", "is_locked", "is_writable", "read", "resolve", "open", "thread")


class WorldDisk:
    """The disk of one host. faults: the current settings; may be changed at any time. memory: the file system in its
    memory, which never fails, and loses all in a reboot.
    """

    def __init__(self, surroundings: Surroundings | None = None) -> None:
        self.faults = DiskFaults()
        self.surroundings = surroundings if surroundings is not None else Surroundings()
        self.tree = FileTree(self.surroundings.unix_ns)
        self.memory = self._new_memory()
        #: How many calls were slow.
        self.num_slow = 0
        self._num_calls: Counter[str] = Counter()
        self._open: dict[str, list[_OpenFile]] = {}

    @property
    def num_changes(self) -> int:
        """How many calls may have changed what is on the disk."""
        return self._num_calls.total() - sum(self._num_calls[name] for name in _LOOKS)

    def of(self, process: str) -> ProcessDisk:
        """The disk as one process sees it."""
        return ProcessDisk(self, process)

    def open_files(self, process: str) -> list[Path]:
        """The paths of the files that the process has open."""
        return [file.path for file in self._open.get(process, [])]

    def crash(self, process: str) -> None:
        """Close all files that the process has open, which releases its locks."""
        for file in [*self._open.get(process, [])]:
            file.release()
        self._open.pop(process, None)

    def reboot(self) -> None:
        """End all processes, and lose some of the pending pages and names."""
        for process in [*self._open]:
            self.crash(process)
        self.memory = self._new_memory()
        self.tree.reboot(lambda number: self._keep("names", number), lambda number: self._keep("pages", number))

    def _new_memory(self) -> FileTree:
        memory = FileTree(self.surroundings.unix_ns)
        for folder in (*reversed(MEMORY.parents[:-1]), MEMORY):
            memory.add(memory.free_place(folder), memory.new_folder())
        return memory

    def tree_at(self, path: Path) -> FileTree:
        """The file system that a path leads to."""
        return self.memory if path.is_relative_to(MEMORY.parent) else self.tree

    def write_back(self) -> None:
        """Bring everything pending to the medium, as sync(2) does."""
        self.tree.write_back()

    def _keep(self, what: str, number: int) -> list[bool]:
        """Which of `number` pending items reach the medium: none, all, the first few, or a random subset."""
        self._num_calls[what] += 1
        call = self._num_calls[what]
        drawn = self.surroundings.draw(f"kept {what}", call)
        match drawn % 4:
            case 0:
                kept = [False] * number
            case 1:
                kept = [True] * number
            case 2:
                kept = [index < drawn // 4 % (number + 1) for index in range(number)]
            case _:
                kept = [self.surroundings.draw(f"kept {what} {index}", call) % 2 == 0 for index in range(number)]
        if not all(kept):
            self.surroundings.fault(f"lost {what}", call)
        return kept

    @contextlib.contextmanager
    def call(self, process: str, name: str, path: Path) -> Iterator[_Call]:
        """A call of a process into the system."""
        self._num_calls[name] += 1
        faults = DiskFaults() if path.is_relative_to(MEMORY) else self.faults
        call = _Call(self, name, self._num_calls[name], faults, self.surroundings.before_call(process, name, path))
        if call.happens(f"slow {name}", faults.slow):
            self.num_slow += 1
            self.surroundings.spend(1 + call.draw(f"time of slow {name}") % faults.most_slow_ns)
        try:
            yield call
        finally:
            self.surroundings.after_call(process, name, path)

    def draw_slowness(self) -> int:
        """How long the next calls of a thread take, in nanoseconds."""
        self._num_calls["thread"] += 1
        call = _Call(self, "thread", self._num_calls["thread"], self.faults, False)
        slow = call.happens("slow thread", self.faults.slow)
        self.num_slow += slow
        return 1 + call.draw("time of a slow thread") % self.faults.most_slow_ns if slow else 0

    def add_open(self, file: _OpenFile) -> None:
        """Add a file that a process has opened."""
        self._open.setdefault(file.process, []).append(file)

    def remove_open(self, file: _OpenFile) -> None:
        """Remove a file that was closed."""
        self._open[file.process].remove(file)

    @property
    def num_bytes(self) -> int:
        """The size of all files that have names or are open."""
        files = {file.number: file for file in self.tree.files()}
        files |= {each.file.number: each.file for opened in self._open.values() for each in opened}
        return sum(len(file.content) for file in files.values())


class _Call(NamedTuple):
    """A call of a process. number: among the calls of that name; faults: of what it goes to; is_cut: do only half of
    it.
    """

    disk: WorldDisk
    name: str
    number: int
    faults: DiskFaults
    is_cut: bool

    def draw(self, what: str) -> int:
        return self.disk.surroundings.draw(what, self.number)

    def report(self, fault: str) -> None:
        self.disk.surroundings.fault(fault, self.number)

    def happens(self, fault: str, one_in: int) -> bool:
        """Whether this call is the one in `one_in` that the fault strikes."""
        is_so = bool(one_in) and self.draw(fault) % one_in == 0
        if is_so:
            self.report(fault)
        return is_so

    def check_writable(self, path: Path) -> None:
        if self.faults.is_read_only:
            self.report("read-only")
            raise error_of(errno.EROFS, path)

    def check_change(self, path: Path) -> None:
        """Fail if a change is to fail. Called before any change but a sync."""
        self.check_writable(path)
        if self.happens(f"error of {self.name}", self.faults.errors):
            raise error_of(errno.EIO, path)

    def check_name(self, path: Path) -> None:
        """Fail if there is no room for a new name: on a full disk, some file systems have none."""
        self.check_change(path)
        capacity = self.faults.capacity
        if capacity is not None and capacity <= self.disk.num_bytes and self.happens(f"no room to {self.name}", 2):
            raise error_of(errno.ENOSPC, path)

    def num_written(self, num_bytes: int, path: Path) -> int:
        """How many of `num_bytes` bytes a write takes."""
        capacity = self.faults.capacity
        room = num_bytes if capacity is None else max(capacity - self.disk.num_bytes, 0)
        if room < num_bytes:
            self.report("full")
            if not room:
                raise error_of(errno.ENOSPC, path)
            num_bytes = room
        if num_bytes > 1 and self.happens("short write", self.faults.short_writes):
            num_bytes = 1 + self.draw("bytes of a short write") % (num_bytes - 1)
        return self.draw("bytes of half a write") % (num_bytes + 1) if self.is_cut else num_bytes


class ProcessDisk:
    """The Disk of one process."""

    def __init__(self, disk: WorldDisk, process: str) -> None:
        self._disk = disk
        self._process = process

    def _tree(self, path: Path) -> FileTree:
        return self._disk.tree_at(path)

    def _call(self, name: str, path: Path) -> contextlib.AbstractContextManager[_Call]:
        return self._disk.call(self._process, name, path)

    def create(self, path: Path) -> _WritableFile:
        with self._call("create", path) as call:
            place = self._tree(path).free_place(path)
            call.check_name(path)
            file = self._tree(path).new_file()
            self._tree(path).add(place, file)
            return _WritableFile(self._disk, self._process, path, file)

    def append(self, path: Path) -> _WritableFile:
        with self._call("append", path) as call:
            file = self._tree(path).find_file(path)
            call.check_writable(path)
            if file.is_locked:
                raise error_of(errno.EAGAIN)
            return _WritableFile(self._disk, self._process, path, file)

    def open(self, path: Path) -> _ReadableFile:
        with self._call("open", path) as call:
            file = self._tree(path).find_file(path)
            if path in call.faults.unreadable:
                call.report(f"refused to open {path.name}")
                raise error_of(errno.EACCES, path)
            if file.medium and call.happens("bit rot", call.faults.bit_rot):
                file.rot(call.draw("rotten bit"))
            return _ReadableFile(self._disk, self._process, path, file)

    def read(self, path: Path) -> bytes:
        file = self.open(path)
        try:
            return file.read()
        finally:
            file.close()

    def status(self, path: Path) -> FileStatus | None:
        with self._call("status", path), contextlib.suppress(OSError):
            return _status(self._tree(path).find(path))
        return None

    def list(self, folder: Path) -> list[str]:
        with self._call("list", folder):
            return [*self._tree(folder).find_folder(folder).entries]

    def is_link(self, path: Path) -> bool:
        with self._call("is_link", path), contextlib.suppress(OSError):
            return isinstance(self._tree(path).find(path, follows=False), Link)
        return False

    def resolve(self, path: Path) -> Path:
        with self._call("resolve", path):
            return self._tree(path).place(path, is_strict=False).path

    def is_private(self, folder: Path) -> bool:
        with self._call("is_private", folder):
            return self._is_folder(folder)

    def is_writable(self, folder: Path) -> bool:
        with self._call("is_writable", folder) as call:
            if call.faults.is_read_only:
                call.report("read-only")
            return self._is_folder(folder) and not call.faults.is_read_only

    def make_folder(self, path: Path) -> None:
        with self._call("make_folder", path) as call:
            self._make_folder(call, path)

    def _make_folder(self, call: _Call, path: Path) -> None:
        place = self._tree(path).free_place(path)
        call.check_name(path)
        self._tree(path).add(place, self._tree(path).new_folder())

    def make_folders(self, path: Path) -> None:
        with self._call("make_folders", path) as call:
            self._make_folders(call, path)

    def _make_folders(self, call: _Call, path: Path) -> None:
        try:
            self._make_folder(call, path)
        except FileNotFoundError:
            self._make_folders(call, path.parent)
            if not call.is_cut:
                self._make_folders(call, path)
        except FileExistsError:
            if not self._is_folder(path):
                raise

    def _is_folder(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return isinstance(self._tree(path).find(path), Folder)
        return False

    def link(self, path: Path, new: Path) -> None:
        with self._call("link", path) as call:
            node, place = self._tree(path).find(path, follows=False), self._tree(path).free_place(new)
            call.check_name(new)
            if not call.faults.has_links:
                call.report("no links")
            if isinstance(node, Folder) or not call.faults.has_links:
                raise error_of(errno.EPERM, new)
            self._tree(path).add(place, node)

    def symlink(self, target: str, new: Path) -> None:
        with self._call("symlink", new) as call:
            place = self._tree(new).free_place(new)
            call.check_name(new)
            self._tree(new).add(place, self._tree(new).new_link(target))

    def rename(self, path: Path, new: Path) -> None:
        with self._call("rename", path) as call:
            call.check_change(path)
            self._tree(path).rename(path, new)

    def unlink(self, path: Path) -> None:
        with self._call("unlink", path) as call, contextlib.suppress(FileNotFoundError):
            call.check_change(path)
            self._tree(path).unlink(path)

    def remove_folder(self, path: Path) -> None:
        with self._call("remove_folder", path) as call:
            call.check_change(path)
            self._tree(path).remove_folder(path)

    def sync_folder(self, path: Path) -> None:
        with self._call("sync_folder", path) as call:
            folder = self._tree(path).find_folder(path)
            call.check_writable(path)
            if call.happens("error of sync_folder", call.faults.sync_errors):
                raise error_of(errno.EIO)
            self._tree(path).sync_folder(folder)


class _OpenFile:
    """A file that a process has open."""

    def __init__(self, disk: WorldDisk, process: str, path: Path, file: File) -> None:
        self.process = process
        self.path = path
        self.file = file
        self._disk = disk
        self._is_open = True
        disk.add_open(self)

    def call(self, name: str) -> contextlib.AbstractContextManager[_Call]:
        """A call that concerns this file."""
        return self._disk.call(self.process, name, self.path)

    def status(self) -> FileStatus:
        with self.call("file status"):
            self._check_open()
            return _status(self.file)

    def close(self) -> None:
        if self._is_open:
            with self.call("close"):
                self.release()

    def release(self) -> None:
        """Close it without a call, because its process has ended."""
        self._is_open = False
        self._disk.remove_open(self)

    def _check_open(self) -> None:
        if not self._is_open:
            raise error_of(errno.EBADF)


class _WritableFile(_OpenFile):
    def __init__(self, disk: WorldDisk, process: str, path: Path, file: File) -> None:
        super().__init__(disk, process, path, file)
        file.is_locked = True

    def write(self, content: bytes) -> int:
        with self.call("write") as call:
            self._check_open()
            call.check_change(self.path)
            num_bytes = call.num_written(len(content), self.path)
            if num_bytes:
                self.file.append(content[:num_bytes], self._disk.surroundings.unix_ns())
            return num_bytes

    def truncate(self, num_bytes: int) -> None:
        with self.call("truncate") as call:
            self._check_open()
            call.check_change(self.path)
            self.file.truncate(num_bytes, self._disk.surroundings.unix_ns())

    def sync(self) -> None:
        with self.call("sync") as call:
            self._check_open()
            call.check_writable(self.path)
            if call.happens("error of sync", call.faults.sync_errors):
                # Linux then marks the pages as clean, so that another sync does not write them.
                self.file.persist(lambda number: [False] * number)
                raise error_of(errno.EIO)
            self.file.persist(keep_all)

    def release(self) -> None:
        super().release()
        self.file.is_locked = False


class _ReadableFile(_OpenFile):
    def __init__(self, disk: WorldDisk, process: str, path: Path, file: File) -> None:
        super().__init__(disk, process, path, file)
        # Buffered exactly as a real file is.
        self._buffer = io.BufferedReader(_Raw(self), READ_BUFFER_BYTES)
        self.read = self._buffer.read
        self.readline = self._buffer.readline
        self.seek = self._buffer.seek
        self.tell = self._buffer.tell

    def is_locked(self) -> bool:
        with self.call("is_locked"):
            self._check_open()
            return self.file.is_locked

    def close(self) -> None:
        super().close()
        # Not reached if the process dies, perhaps within a call that the buffer makes.
        self._buffer.close()


class _Raw(io.RawIOBase):
    """The raw file below the buffer of an open file."""

    def __init__(self, opened: _ReadableFile) -> None:
        self._opened = opened
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        with self._opened.call("read"):
            piece = self._opened.file.content[self._position : self._position + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._opened.file.content)}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position


def _status(node: Node) -> FileStatus:
    num_bytes = len(node.content) if isinstance(node, File) else 0
    is_file, is_folder = isinstance(node, File), isinstance(node, Folder)
    mode = 0o700 if is_folder else 0o600
    return FileStatus((_DEVICE, node.number), num_bytes, node.modified_ns, is_file, is_folder, mode)
