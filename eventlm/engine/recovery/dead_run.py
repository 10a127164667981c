"""A run as its last engine left it, and what another one can make of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.bus.segment_file import Extent, SegmentFile
from eventlm.core.carrying import CarriedState
from eventlm.core.core import Core
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply, SpoolHead
from eventlm.events import Header
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.system.clock import Clock
from eventlm.system.disk import Disk, WritableFile

#: Files in a run's spool, one for each time that it was tried to recover it.
ATTEMPT = "attempt-"


class Followers(NamedTuple):
    """What follows a run beside its core."""

    registry: RequestRegistry
    metrics: MetricsStore
    rows: EndedRows


class DeadRun(Struct, frozen=True, kw_only=True):
    """A run whose engine has died or handed over. The file of its last segment is locked.

    end: as far as that file was followed. now_ns: the time of the run there. damaged: requests of which something is
    lost. cut: why the log was not followed to its end; empty if it was. has_loss: it lacks outputs that were seen,
    perhaps.
    """

    folder: Path
    spool_folder: Path
    file: WritableFile
    header: Header
    head: SpoolHead
    end: Extent
    now_ns: int
    damaged: set[int]
    cut: str = ""
    has_loss: bool = False

    def origin_ns(self, clock: Clock) -> int:
        """The time on this host's monotonic clock at which the run's clock is 0."""
        if self._is_same_boot(clock):
            return self.head.origin_ns
        # The wall clock may have been set back.
        now_ns = max(clock.unix_ns() - int(self.header.unix_start_ns), self.now_ns + 1)
        return clock.monotonic_ns() - now_ns

    def forget_attempts(self, disk: Disk) -> None:
        """It goes on, or does not for a reason that has nothing to do with it."""
        with contextlib.suppress(OSError):
            for name in disk.list(self.spool_folder):
                if name.startswith(ATTEMPT):
                    disk.unlink(self.spool_folder / name)

    def may_lack_outputs(self, clock: Clock) -> bool:
        """Whether clients may have seen what the log does not have."""
        return self.has_loss or not (self.head.outputs_wait_for_syncs or self._is_same_boot(clock))

    def reason(self, clock: Clock) -> str:
        """Why the engine before has ended, as far as that can be seen."""
        return "process" if self._is_same_boot(clock) else "reboot"

    def _is_same_boot(self, clock: Clock) -> bool:
        return bool(self.head.boot_id) and self.head.boot_id == clock.boot_id()


class RecoveredRun(DeadRun, frozen=True, kw_only=True):
    """A run that an engine goes on with."""

    core: Core
    live: LiveRequests
    followers: Followers

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


class CarriedRequests(DeadRun, frozen=True, kw_only=True):
    """What a run leaves to another one, of an engine with other limits or plug-ins, or of another version: its live
    requests, and replies that are over and kept.
    """

    state: CarriedState
    replies: list[KeptReply]
