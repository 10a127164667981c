"""Finds the run that an engine goes on with, and reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from msgspec import structs

from eventlm.bus.bus import Bus
from eventlm.bus.run_folder import LATEST_NAME, TRACE_NAME, closed_segments, runs
from eventlm.bus.segment_file import Extent
from eventlm.bus.segment_reader import SegmentReader
from eventlm.bus.spool import first_frame, has_lost, read_frames, remove_spool, spool_name
from eventlm.core.carrying import read_carried
from eventlm.core.core import Core
from eventlm.core.state.sequence import State
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.engine.live_requests import LiveRequests, ignore_output
from eventlm.engine.recovery.dead_run import ATTEMPT, CarriedRequests, DeadRun, Followers, RecoveredRun
from eventlm.engine.recovery.replay import LOST_TOKEN, CutError, ReplayedCore, lost_request
from eventlm.engine.request_spool import kept_replies
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
from eventlm.errors import EventLMError, TraceCorruptError, TraceVersionError, UsageError
from eventlm.events import Header, Snapshot
from eventlm.events.codec import FACT_TAGS
from eventlm.system.disk import Disk, WritableFile
from eventlm.system.system import System

#: How often it is tried to recover a run. What makes an engine die may come back with it.
MAX_ATTEMPTS = 2

log = structlog.get_logger("eventlm.engine")


class RunBuilder(NamedTuple):
    """Makes the parts of a run anew. core: of a header, and of the snapshot that follows it, if one does."""

    core: Callable[[Header, bytes | None], Core]
    live: Callable[[Header, SpoolHead], LiveRequests]
    followers: Callable[[], Followers]


class Takeover(NamedTuple):
    """How an engine can take over from a run. builder: follows its log, by its own limits; None if this engine has
    other plug-ins, or is another version. goes_on: whether it then goes on with the run itself.
    """

    builder: RunBuilder | None
    goes_on: bool


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


def check_readable(disk: Disk, record_folder: Path, spool_folder: Path) -> None:
    """Check that an engine of this version can take over from the newest run of a folder that has a spool. Raises
    UsageError.
    """
    spools = [run for run in runs(record_folder, disk) if disk.status(spool_folder / run.name) is not None]
    if not spools:
        return
    name = spools[0].name
    try:
        with _reading(disk, spools[0]):
            head = first_frame(disk, spool_folder / name)
        if head and isinstance(frame := decode_frame(head), SpoolHead):
            _check_format(frame, spool_folder / name)
    except (TraceCorruptError, TraceVersionError, msgspec.DecodeError) as error:
        raise UsageError(
            f"this version of eventlm cannot go on with the requests of the run {name}; stop the server, which lets "
            f"them finish, and start it: {error}"
        ) from error


def _check_format(head: SpoolHead, path: Path) -> None:
    if head.format != SPOOL_FORMAT:
        raise UsageError(f"{path} has the format {head.format}, and this version reads {SPOOL_FORMAT}")


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
    takeover_of: Callable[[Header], Takeover],
    on_lost: Callable[[Path], None] = lambda spool: None,
) -> RecoveredRun | CarriedRequests | None:
    """The newest of a server's runs in a folder, if an engine can go on with it or with its requests; else None.

    is_own: whether a run is the server's. on_lost: called with a spool that is of no use any more once another run has
    begun.

    A run that has ended in order, or that another process writes, is none. Damage costs the requests that it touches.
    Spools of older runs are removed, and so is one that could not be recovered MAX_ATTEMPTS times.
    """
    recovered: RecoveredRun | CarriedRequests | None = None
    is_newest = True
    _remove_orphans(disk, spool_folder)
    # By their names alone, a clock that was set back would make an older one the newest.
    latest = disk.resolve(record_folder / LATEST_NAME).name
    for folder in sorted(runs(record_folder, disk), key=lambda run: run.name != latest):
        spool = spool_folder / folder.name
        with contextlib.ExitStack() as stack:
            try:
                reader = stack.enter_context(_reading(disk, folder))
                if not is_own(reader.header):
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
            if not _has_begun(disk, reader, folder):
                remove_spool(disk, spool)
                continue
            if is_newest and disk.status(spool) is not None:
                recovered = _try_to_recover(disk, folder, spool, file, takeover_of)
                if recovered is not None:
                    stack.pop_all()
                else:
                    on_lost(spool)
            else:
                remove_spool(disk, spool)
            is_newest = False
    return recovered


def _has_begun(disk: Disk, reader: SegmentReader, folder: Path) -> bool:
    """Whether a run that was to begin with the requests of another one has them all. Later segments get their names
    once they are complete.
    """
    if not reader.header.s or closed_segments(folder, disk):
        return True
    with contextlib.suppress(TraceCorruptError):
        _snapshot(reader)
        return True
    return False


def _remove_orphans(disk: Disk, spool_folder: Path) -> None:
    """Remove spools of runs whose traces are gone: nobody can go on with them."""
    for name in disk.list(spool_folder):
        folder = spool_folder / name
        with contextlib.suppress(msgspec.DecodeError):
            head = decode_frame(first_frame(disk, folder))
            if isinstance(head, SpoolHead) and disk.status(Path(head.trace)) is None:
                remove_spool(disk, folder)


def _try_to_recover(
    disk: Disk, folder: Path, spool: Path, file: WritableFile, takeover_of: Callable[[Header], Takeover]
) -> RecoveredRun | CarriedRequests | None:
    """None for a run that has ended in order, or that cannot be recovered."""
    num_attempts = 0
    try:
        num_attempts = sum(name.startswith(ATTEMPT) for name in disk.list(spool))
        if num_attempts == MAX_ATTEMPTS:
            raise UsageError(f"{MAX_ATTEMPTS} attempts have failed; its requests are lost")
        disk.create(spool / f"{ATTEMPT}{num_attempts + 1}").close()
        recovered = _recover(disk, folder, spool, file, takeover_of)
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
    takeover_of: Callable[[Header], Takeover],
) -> RecoveredRun | CarriedRequests | None:
    with _reading(disk, folder) as reader:
        if _has_ended(reader):
            return None
        header = reader.header
        takeover = takeover_of(header)
        if takeover.builder is None:
            return _read_handed_over(disk, reader, folder, spool_folder, file)
        until: int | None = None
        cut, has_loss = "", has_lost(disk, spool_folder)
        while True:
            # Anew each time: what is restored goes on to change.
            spool = _read_spool(disk, spool_folder, header)
            replayed, followers = _begin(reader, header, spool, takeover.builder)
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
    left = DeadRun(
        folder=folder,
        spool_folder=spool_folder,
        file=file,
        header=header,
        head=spool.head,
        end=end,
        now_ns=replayed.core.state.now_ns,
        damaged=replayed.damaged,
        cut=cut,
        has_loss=has_loss or bool(replayed.damaged),
    )
    if takeover.goes_on:
        return RecoveredRun(**structs.asdict(left), core=replayed.core, live=replayed.live, followers=followers)
    state, replies = read_carried(replayed.core.snapshot()), kept_replies(replayed.live, followers.registry)
    return CarriedRequests(**structs.asdict(left), state=state, replies=replies)


def _read_handed_over(
    disk: Disk, reader: SegmentReader, folder: Path, spool_folder: Path, file: WritableFile
) -> CarriedRequests:
    """What an engine has left that handed over, so that nothing follows its last snapshot. Raises UsageError if it
    died.
    """
    header, has_facts = reader.header, False
    for line in reader:
        has_facts |= line.tag in FACT_TAGS
        end = Extent(line.number, reader.position, reader.last_h)
    if has_facts or not header.s:
        raise UsageError(
            "it has other plug-ins than this engine, or is of another version of eventlm, and its engine died; its "
            "requests are lost"
        )
    spool, state = _read_spool(disk, spool_folder, header), read_carried(_snapshot(reader))
    kept = [each for reply in spool.replies for each in reply.live]
    damaged = state.arrivals.keys() - {each.seq for each in kept if not _lacks_tokens(each)}
    return CarriedRequests(
        folder=folder,
        spool_folder=spool_folder,
        file=file,
        header=header,
        head=spool.head,
        end=end,
        now_ns=state.now_ns,
        damaged=damaged,
        has_loss=bool(damaged) or has_lost(disk, spool_folder),
        state=state,
        replies=spool.replies,
    )


def _lacks_tokens(kept: KeptRequest) -> bool:
    """Whether its engine died before it could end it, after tokens of it had been lost."""
    return any(LOST_TOKEN in sequence.token_ids for sequence in kept.sequences)


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
    if head is not None:
        _check_format(head, path)
    if head is None or head.run != header.run or head.first_s != header.s:
        raise TraceCorruptError(f"{path} is damaged where it begins; none of its requests can go on")
    return _Spool(head, replies, records, dropped)


def _begin(reader: SegmentReader, header: Header, spool: _Spool, builder: RunBuilder) -> tuple[ReplayedCore, Followers]:
    """What was there when the segment began."""
    snapshot = _snapshot(reader) if header.s else None
    core = builder.core(header, snapshot)
    live, followers = builder.live(header, spool.head), builder.followers()
    bus = Bus(next_s=header.s, on_broken=_report_broken)
    if snapshot is not None:
        launches = [launched for worker in spool.head.workers for launched in worker.launches]
        followers.metrics.take_up(header, msgspec.json.decode(snapshot, type=StateSnapshot), launches)
    bus.attach(followers.metrics.apply)
    replayed = ReplayedCore(header, core, live, followers.registry, spool.records, bus=bus, rows=followers.rows)
    for kept in spool.replies:
        for each, sink in zip(kept.live, followers.registry.restore(kept), strict=True):
            live.restore(each, sink)
            if _lacks_tokens(each):
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
