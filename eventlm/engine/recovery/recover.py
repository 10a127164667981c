"""Finds the run that an engine goes on with, and reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from eventlm.bus.bus import Bus
from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments, runs
from eventlm.bus.segment_file import Extent, SegmentFile
from eventlm.bus.segment_reader import SegmentReader
from eventlm.bus.spool import first_frame, has_lost, read_frames, remove_spool, spool_name
from eventlm.core.core import Core
from eventlm.core.state.sequence import State
from eventlm.engine.live_requests import LiveRequests, Sink
from eventlm.engine.recovery.replay import LOST_TOKEN, CutError, ReplayedCore, ignore_output, lost_request
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import (
    SPOOL_FORMAT,
    DrainRecords,
    DropRecord,
    KeptReply,
    KeptRequest,
    KeptSequence,
    Record,
    SpoolHead,
    decode_frame,
)
from eventlm.errors import EventLMError, TraceCorruptError, UsageError
from eventlm.events import Header, Snapshot
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.system.clock import Clock
from eventlm.system.disk import Disk, WritableFile
from eventlm.system.system import System

#: How often it is tried to recover a run. What makes an engine die may come back with it.
MAX_ATTEMPTS = 2
_ATTEMPT = "attempt-"

log = structlog.get_logger("eventlm.engine")


class Followers(NamedTuple):
    """What follows a run beside its core."""

    registry: RequestRegistry
    metrics: MetricsStore
    rows: EndedRows


class RunBuilder(NamedTuple):
    """Makes the parts of a run anew. core: of a header, and of the snapshot that follows it, if one does."""

    core: Callable[[Header, bytes | None], Core]
    live: Callable[[Header, SpoolHead], LiveRequests]
    followers: Callable[[], Followers]


class RecoveredRun(NamedTuple):
    """A run as its last engine left it. The file of its last segment is locked.

    end: as far as the file was followed. damaged: requests of which something is lost.
    cut: why the log was not followed to its end; empty if it was. has_loss: it lacks outputs that were seen, perhaps.
    """

    folder: Path
    spool_folder: Path
    file: WritableFile
    end: Extent
    header: Header
    head: SpoolHead
    core: Core
    live: LiveRequests
    followers: Followers
    damaged: set[int]
    cut: str
    has_loss: bool

    @property
    def epochs(self) -> list[int]:
        """By its number, the epoch of each replica's next worker. One more may have come up whose fact is lost."""
        return [replica.epoch + 2 for replica in self.core.state.replicas]

    def last_segment(self, disk: Disk) -> SegmentFile:
        """The last segment. What follows its end is cut off, and kept in files of their own. Raises OSError."""
        path = self.folder / TRACE_NAME
        for segment in closed_segments(self.folder, disk):
            # A power failure has kept its name, and not that of the one that came after it.
            if segment.first_s > self.header.s:
                disk.rename(segment.path, self.folder / f"cut-{segment.path.name}")
        with contextlib.closing(disk.open(path)) as file:
            file.seek(self.end.num_bytes)
            if rest := file.read(-1):
                path_aside = self.folder / f"cut-{self.core.next_seq:012}"
                # Of an engine that died here.
                disk.unlink(path_aside)
                aside = disk.create(path_aside)
                aside.write(rest)
                aside.sync()
                aside.close()
        self.file.truncate(self.end.num_bytes)
        self.file.sync()
        return SegmentFile(disk, path, first_s=self.header.s, file=self.file, written=self.end)

    def origin_ns(self, clock: Clock) -> int:
        """The time on this host's monotonic clock at which the run's clock is 0."""
        if self._is_same_boot(clock):
            return self.head.origin_ns
        # The wall clock may have been set back.
        now_ns = max(clock.unix_ns() - int(self.header.unix_start_ns), self.core.state.now_ns + 1)
        return clock.monotonic_ns() - now_ns

    def forget_attempts(self, disk: Disk) -> None:
        """It goes on, or does not for a reason that has nothing to do with it."""
        with contextlib.suppress(OSError):
            for name in disk.list(self.spool_folder):
                if name.startswith(_ATTEMPT):
                    disk.unlink(self.spool_folder / name)

    def may_lack_outputs(self, clock: Clock) -> bool:
        """Whether clients may have seen what the log does not have."""
        return self.has_loss or not (self.head.outputs_wait_for_syncs or self._is_same_boot(clock))

    def reason(self, clock: Clock) -> str:
        """Why the engine before has ended, as far as that can be seen."""
        return "process" if self._is_same_boot(clock) else "reboot"

    def _is_same_boot(self, clock: Clock) -> bool:
        return bool(self.head.boot_id) and self.head.boot_id == clock.boot_id()


def spool_folder(system: System, recover: str) -> Path:
    """The folder that `--recover` names."""
    return system.shared_folders.lasting if recover == "memory" else Path(recover)


def check_spool_folder(disk: Disk, folder: Path) -> None:
    """Make the folder of spools, where nobody else may look. Raises UsageError."""
    try:
        disk.make_folders(folder)
        if not disk.is_private(folder):
            raise UsageError(
                f"--recover {folder}: others may use this folder, and it would hold requests; chmod 700 it"
            )
    except OSError as error:
        raise UsageError(f"--recover: cannot use {folder}: {error.strerror}; choose another folder") from error


class _Spool(NamedTuple):
    """The frames of a spool. records: by the facts that they belong to."""

    head: SpoolHead
    replies: list[KeptReply]
    records: dict[int, Record]
    dropped: set[str]


def recover(
    disk: Disk,
    record_folder: Path,
    spool_folder: Path,
    *,
    is_own: Callable[[Header], bool],
    builder_of: Callable[[Header], RunBuilder | None],
    on_lost: Callable[[Path], None] = lambda spool: None,
) -> RecoveredRun | None:
    """The newest of a server's runs in a folder, if an engine can go on with it; else None.

    is_own: whether a run is the server's. builder_of: None for the run of an engine with other limits or plug-ins.
    on_lost: called with a spool that is of no use any more once another run has begun.

    A run that has ended in order, or that another process writes, is none. Damage costs the requests that it touches.
    Spools of older runs are removed, and so is one that could not be recovered MAX_ATTEMPTS times.
    """
    recovered: RecoveredRun | None = None
    is_newest = True
    _remove_orphans(disk, spool_folder)
    # By their names alone, a clock that was set back would make an older one the newest.
    latest = disk.resolve(record_folder / LATEST_NAME).name
    for folder in sorted(runs(record_folder, disk), key=lambda run: run.name != latest):
        spool = spool_folder / folder.name
        with contextlib.ExitStack() as stack:
            try:
                if not is_own(stack.enter_context(_reading(disk, folder)).header):
                    continue
                file = disk.append(folder / TRACE_NAME)
            except BlockingIOError:
                # Another process writes it.
                continue
            except (EventLMError, OSError) as error:
                if disk.status(spool) is not None:
                    log.error("a run cannot be recovered", run=folder.name, error=str(error))
                continue
            stack.callback(file.close)
            if is_newest and disk.status(spool) is not None:
                recovered = _try_to_recover(disk, folder, spool, file, builder_of)
                if recovered is not None:
                    stack.pop_all()
                else:
                    on_lost(spool)
            else:
                remove_spool(disk, spool)
            is_newest = False
    return recovered


def _remove_orphans(disk: Disk, spool_folder: Path) -> None:
    """Remove spools of runs whose traces are gone: nobody can go on with them."""
    for name in disk.list(spool_folder):
        folder = spool_folder / name
        with contextlib.suppress(msgspec.DecodeError):
            head = decode_frame(first_frame(disk, folder))
            if isinstance(head, SpoolHead) and disk.status(Path(head.trace)) is None:
                remove_spool(disk, folder)


def _try_to_recover(
    disk: Disk, folder: Path, spool: Path, file: WritableFile, builder_of: Callable[[Header], RunBuilder | None]
) -> RecoveredRun | None:
    """None for a run that has ended in order, or that cannot be recovered."""
    num_attempts = 0
    try:
        num_attempts = sum(name.startswith(_ATTEMPT) for name in disk.list(spool))
        if num_attempts == MAX_ATTEMPTS:
            raise UsageError(f"{MAX_ATTEMPTS} attempts have failed; its requests are lost")
        disk.create(spool / f"{_ATTEMPT}{num_attempts + 1}").close()
        recovered = _recover(disk, folder, spool, file, builder_of)
    except (EventLMError, OSError) as error:
        log.error("a run cannot be recovered", run=folder.name, error=str(error))
        if num_attempts == MAX_ATTEMPTS:
            remove_spool(disk, spool)
        return None
    except Exception:
        # Nothing that a dead engine has left may keep the next one from starting.
        log.exception("a run cannot be recovered: this is a defect, please report it", run=folder.name)
        return None
    if recovered is None:
        remove_spool(disk, spool)
    return recovered


@contextlib.contextmanager
def _reading(disk: Disk, folder: Path) -> Iterator[SegmentReader]:
    reader = SegmentReader(folder / TRACE_NAME, disk=disk)
    try:
        yield reader
    finally:
        reader.close()


def _recover(
    disk: Disk,
    folder: Path,
    spool_folder: Path,
    file: WritableFile,
    builder_of: Callable[[Header], RunBuilder | None],
) -> RecoveredRun | None:
    with _reading(disk, folder) as reader:
        header = reader.header
        builder = builder_of(header)
        if builder is None:
            raise UsageError("it has other limits or plug-ins than this engine; its requests are lost")
        if _has_ended(reader):
            return None
        until: int | None = None
        cut, has_loss = "", has_lost(disk, spool_folder)
        while True:
            # Anew each time: what is restored goes on to change.
            spool = _read_spool(disk, spool_folder, header)
            replayed, followers = _begin(reader, header, spool, builder)
            try:
                end = _follow(reader, replayed, until)
            except CutError as error:
                if until is not None and error.s >= until:
                    raise TraceCorruptError(f"{reader.path} cannot be followed: {error}") from error
                until, cut, has_loss = error.s, str(error), has_loss or error.is_loss
                continue
            break
    for reply_id in spool.dropped:
        followers.registry.forget(reply_id)
    return RecoveredRun(
        folder,
        spool_folder,
        file,
        end,
        header,
        spool.head,
        replayed.core,
        replayed.live,
        followers,
        replayed.damaged,
        cut,
        has_loss or bool(replayed.damaged),
    )


def _read_spool(disk: Disk, folder: Path, header: Header) -> _Spool:
    """The spool of a segment. Raises TraceCorruptError if it is damaged where it begins."""
    path = folder / spool_name(header.s)
    bodies, num_bad_bytes = read_frames(disk, path)
    if num_bad_bytes:
        log.warning("the end of a spool is torn, or a part of it is damaged", path=str(path), bytes=num_bad_bytes)
    head: SpoolHead | None = None
    replies, records, dropped = [], dict[int, Record](), set[str]()
    for body in bodies:
        try:
            frame = decode_frame(body)
        except msgspec.DecodeError:
            continue
        match frame:
            case SpoolHead():
                head = frame
            case KeptReply():
                replies.append(frame)
            case DrainRecords(found):
                dropped.update(each.reply_id for each in found if isinstance(each, DropRecord))
                records |= {each.s: each for each in found if not isinstance(each, DropRecord)}
    if head is not None and head.format != SPOOL_FORMAT:
        raise UsageError(f"{path} has the format {head.format}, and this version reads {SPOOL_FORMAT}")
    if head is None or head.run != header.run or head.first_s != header.s:
        raise TraceCorruptError(f"{path} is damaged where it begins; none of its requests can go on")
    return _Spool(head, replies, records, dropped)


def _begin(reader: SegmentReader, header: Header, spool: _Spool, builder: RunBuilder) -> tuple[ReplayedCore, Followers]:
    """What was there when the segment began."""
    core = builder.core(header, _snapshot(reader) if header.s else None)
    live, followers = builder.live(header, spool.head), builder.followers()
    bus = Bus(next_s=header.s, on_broken=_report_broken)
    bus.attach(followers.metrics.apply)
    replayed = ReplayedCore(header, core, live, followers.registry, spool.records, bus=bus, rows=followers.rows)
    for kept in spool.replies:
        sinks: list[Sink] = [ignore_output] * len(kept.live)
        if kept.submission is not None:
            of_requests = dict(zip(kept.requests, followers.registry.restore(kept, kept.submission), strict=True))
            sinks = [of_requests[each.seq] for each in kept.live]
        for each, sink in zip(kept.live, sinks, strict=True):
            live.restore(each, sink)
            if any(LOST_TOKEN in sequence.token_ids for sequence in each.sequences):
                # The engine before died before it could end the request.
                replayed.damaged.add(each.seq)
    for worker in spool.head.workers:
        live.restore_worker(worker)
    for seq, request in core.state.requests.items():
        if seq not in live:
            replayed.damaged.add(seq)
            sequences = [
                KeptSequence(each.index, [LOST_TOKEN] * each.num_output_tokens, len(each.block_names), b"")
                for each in request.sequences
                if each.state <= State.DECODE
            ]
            lost = KeptRequest(seq, lost_request(request.arrival), request.num_unfinished, "", "", sequences, [])
            live.restore(lost, ignore_output)
    return replayed, followers


def _snapshot(reader: SegmentReader) -> bytes:
    """What the segment begins with. Raises TraceCorruptError."""
    for line in reader:
        event = line.event()
        if isinstance(event, Snapshot):
            return bytes(event.state)
        if line.number > 2:
            break
    raise TraceCorruptError(f"{reader.path} has no snapshot after its header")


def _has_ended(reader: SegmentReader) -> bool:
    """Whether a run has ended in order. One that is damaged has not."""
    with contextlib.suppress(TraceCorruptError):
        for _ in reader:
            pass
    return reader.clean_end


def _follow(reader: SegmentReader, replayed: ReplayedCore, until: int | None) -> Extent:
    """Follow the log, to before event `until`; where that ends."""
    end = Extent(0, 0, "")
    try:
        for line in reader:
            if line.s == until:
                break
            replayed.take(line)
            end = Extent(line.number, reader.position, reader.last_h)
    except TraceCorruptError as error:
        raise CutError(replayed.drain_s, str(error)) from error
    replayed.finish()
    return end


def _report_broken(handler: object, event: object, error: Exception) -> None:
    log.error("an observer cannot follow a run", handler=repr(handler), error=repr(error))
