"""A server goes on where the one before has died: what it brings back, and what its spools hold."""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import structs

from eventlm.bus.recorder import ThreadedRecorder
from eventlm.bus.run_folder import TRACE_NAME
from eventlm.bus.segment_reader import SegmentReader
from eventlm.bus.spool import read_frames, spool_name
from eventlm.engine.admin import Resume
from eventlm.engine.recovery.dead_run import RecoveredRun
from eventlm.engine.recovery.recover import MAX_ATTEMPTS, spool_folder
from eventlm.engine.request import FinishedOutput, RequestOutput
from eventlm.engine.request_spool import kept_replies
from eventlm.engine.spool.records import ArrivalRecord, DrainRecords, KeptReply, SpoolHead, StepRecord, decode_frame
from eventlm.errors import InvariantError
from eventlm.events import Snapshot
from tests.world.machine.process import SIGKILL
from tests.world.programs.server import RUNS, WorldServer

if TYPE_CHECKING:
    from tests.world.run import Run

#: Effects of a disk that fails.
_FAILURES = ("error of ", "full", "no room", "read-only", "no links", "refused")
#: When an operator lets a server go on that was paused when the one before died.
_RESUME_NS = 20_000_000_000
_decode_output = msgspec.msgpack.Decoder(tuple[int, RequestOutput]).decode


class _Remains(NamedTuple):
    """What a server had when it died between two drains, all of whose outputs had left: what its core would have
    written into a snapshot before event `next_s`, its replies, and the names of its blocks as SpoolHead has them.
    """

    next_s: int
    state: object
    replies: list[KeptReply]
    block_names: list[tuple[bytes, int]]


class _Owed(NamedTuple):
    """What the next server must go on with. num_failures: of the disk, up to the death. remains: None if the server
    died at another moment.
    """

    run: str
    num_failures: int
    remains: _Remains | None


def first_new_s(recovered: RecoveredRun) -> int:
    """The first event of the engine that goes on with a run."""
    return recovered.header.s + recovered.end.num_lines


class Recoveries:
    """Checks the servers of a run that has `record.recover`; nothing is owed without."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._checks = run.checks
        self._recover = run.config.record.recover
        self._reader = run.world.disk.of("reader")
        self._owed: _Owed | None = None
        #: Deleted replies that may come back, because something was lost since.
        self._forgiven: set[str] = set()
        #: How many servers in a row have ended before they were ready.
        self._num_vain = 0

    def died(self, server: WorldServer) -> bool:
        """A server has ended. Whether the next one must go on with its replies."""
        if not server.is_ready:
            self._num_vain += 1
            if self._num_vain >= MAX_ATTEMPTS:
                self._owed = None
            return self._owed is not None
        self._owed = None
        folder = server.run_folder
        was_killed = server.process.returncode == -SIGKILL
        if self._recover and was_killed and folder is not None and not self._run.logs.was_killed(folder.name):
            self._owed = _Owed(folder.name, self._num_failures, self._remains_of(server))
        return self._owed is not None

    def rebooted(self) -> bool:
        """The power of the host has failed. Whether the next server may go on with less than what was shown."""
        record = self._run.config.record
        if record.recover == "memory" or record.record_sync != "group":
            self._owed = None
        return bool(record.recover) and self._owed is None

    def is_ready(self, server: WorldServer) -> bool:
        """A server is ready. Whether it has gone on with all of the one before."""
        owed, self._owed, self._num_vain = self._owed, None, 0
        if server.engine is not None and server.engine.paused:
            # The operator's call may have come while there was no server.
            self._run.world.after(_RESUME_NS, lambda: self._run.administer(Resume()))
        recovered = None if server.engine is None else server.engine._recovered
        if recovered is not None:
            self._run.world.faults["recovered"] += 1
            self._run.logs.go_on(recovered.header.run, first_new_s(recovered))
        if owed is None or owed.num_failures != self._num_failures:
            # The spool may not know of them.
            self._forgiven |= self._deleted
            return False
        goes_on = recovered is not None and recovered.header.run == owed.run
        self._checks.check("the next engine goes on", goes_on, f"{server.process.name} not with {owed.run}")
        assert recovered is not None
        self._checks.check("nothing is damaged", not recovered.damaged, f"{owed.run}: requests {recovered.damaged}")
        if owed.remains is not None:
            self._check_restored(recovered, owed.remains)
        return True

    @property
    def _deleted(self) -> set[str]:
        """The replies whose clients had them deleted."""
        return {client.deleted_id for client in self._run.clients if client.deleted_id}

    @property
    def _num_failures(self) -> int:
        return sum(number for name, number in self._run.world.faults.items() if name.startswith(_FAILURES))

    def _remains_of(self, server: WorldServer) -> _Remains | None:
        engine = server.engine
        core = None if engine is None else engine._engine_core
        if core is None or core._spool is None or self._run.world.running is server.process:
            return None
        recorder = core._recorder
        if isinstance(recorder, ThreadedRecorder) and (recorder._in_flight or recorder._waiting):
            return None
        with contextlib.suppress(InvariantError):
            return _Remains(
                core.core.next_seq,
                _comparable(core.core.snapshot()),
                kept_replies(core.live, engine.registry),
                core.live.keep_names(),
            )
        return None

    def _check_restored(self, recovered: RecoveredRun, remains: _Remains) -> None:
        """Check that a server has restored what the one before had."""
        checks, run, first_s = self._checks, recovered.header.run, first_new_s(recovered)
        checks.check("nothing written is cut off", first_s == remains.next_s, f"{run}: {first_s} of {remains.next_s}")
        # It is ready in the segment that it has begun.
        with contextlib.closing(SegmentReader(RUNS / run / TRACE_NAME, disk=self._reader)) as segment:
            _, second = (line.event() for line in islice(segment, 2))
        assert isinstance(second, Snapshot)
        state = _comparable(bytes(second.state))
        checks.check("the restored state is the replayed one", state == remains.state, f"{state}, {remains.state}")
        head, *frames = read_frames(self._reader, self._folder / run / spool_name(first_s)).bodies
        replies = [frame for frame in map(decode_frame, frames) if isinstance(frame, KeptReply)]
        restored = [*map(_without_rows, replies)]
        found = decode_frame(head)
        assert isinstance(found, SpoolHead)
        checks.check("blocks keep their names", found.block_names == remains.block_names, f"{run}: {found.block_names}")
        # Nobody has written down which replies have been dropped because nobody came back for them.
        lost = [each for each in remains.replies if each.live or each.outputs is not None]
        lost = [each for each in lost if _without_rows(each) not in restored]
        checks.check("replies are restored", not lost, f"{run}: {lost[:1]}, {restored}")
        deleted = self._deleted - self._forgiven
        kept = {each.submission.reply_id for each in replies if each.submission and each.outputs is not None}
        checks.check("deleted replies do not come back", not deleted & kept, f"{run}: {sorted(deleted & kept)}")

    @property
    def _folder(self) -> Path:
        return spool_folder(self._run.server.system, self._recover)

    def _spools(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return self._reader.list(self._folder)
        return []

    def check_rest(self) -> None:
        """Check that spools have forgotten all replies: they are over, and not kept any more."""
        if not self._recover:
            return
        folder = self._run.server.run_folder
        assert folder is not None
        for run in self._spools():
            texts = self._texts(run)
            is_excused = run != folder.name and self._num_failures > 0
            self._checks.check("spools forget", not texts or is_excused, f"{run}: {texts[:1]}")

    def _texts(self, run: str) -> list[object]:
        """All frames of a spool with texts. One that had not begun when its engine died has none."""
        paths = [self._folder / run / name for name in self._reader.list(self._folder / run)]
        frames = [decode_frame(body) for path in paths for body in read_frames(self._reader, path).bodies]
        return [frame for frame in frames if isinstance(frame, KeptReply) or _has_text(frame)]

    def check_end(self) -> None:
        """Check that the last server, which has ended in order, has left no spool."""
        if not self._recover or self._run.server.process.returncode:
            return
        left = [run for run in self._spools() if self._texts(run)]
        self._checks.check("no spool is left", not left or bool(self._num_failures), f"{left}")


def _has_text(frame: object) -> bool:
    if not isinstance(frame, DrainRecords):
        return False
    return any(isinstance(each, ArrivalRecord | StepRecord) for each in frame.records)


def _without_rows(reply: KeptReply) -> object:
    """A reply without the measurements of sequences that had begun before the segment."""
    if reply.outputs is None:
        return reply
    outputs = [
        (index, structs.replace(output, row=None) if isinstance(output, FinishedOutput) else output)
        for index, output in map(_decode_output, reply.outputs)
    ]
    return structs.replace(reply, outputs=None), outputs


def _comparable(snapshot: bytes) -> object:
    """A snapshot without its position, which depends on what is written before it."""
    return msgspec.json.decode(snapshot) | {"next_seq": 0}
