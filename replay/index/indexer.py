"""Makes the index of a run from its lines: verified, with the core's state; or from the log alone."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from eventlm.bus.log_reader import LogLine
from eventlm.core.core import Core
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.core.state.block_pool import Node
from eventlm.core.state.core_state import CoreState
from eventlm.events import Admitted, Event, Fact, Header, Marker, Snapshot
from eventlm.metrics.store import MetricsStore
from eventlm.replay.index.fold import RunFold
from eventlm.replay.index.gauges import GaugeSampler
from eventlm.replay.index.tables import NameTable, Table
from eventlm.replay.verify.verifier import Verifier

#: Events between two snapshots of the core: so many are applied again, at most, to reach an event.
SNAPSHOT_EVENTS = 8192
_COMPRESSION_LEVEL = 1


class CoreSnapshot(NamedTuple):
    """The core between two drains, before event `next_s`, at `ts`; compressed."""

    next_s: int
    ts: int
    compressed: bytes

    def state(self) -> bytes:
        """As `Core.snapshot` gave it."""
        return zlib.decompress(self.compressed)


class Indexer:
    """Takes the lines of a run in order. verifier: None: from the log alone, without states and snapshots.

    Raises Found where the run diverges from its replay.
    """

    def __init__(self, header: Header, verifier: Verifier | None) -> None:
        self.header = header
        self.names = NameTable()
        self.snapshots: list[CoreSnapshot] = []
        #: The next event, and the time and the hash of the latest.
        self.next_s = header.s
        self.last_ns = header.ts
        self.fold = RunFold(self.names, recorded_layouts(header))
        cores = enumerate(header.cores_of_replicas())
        self.gauges = GaugeSampler({replica for replica, core in cores if core.forwards})
        self._verifier = verifier
        self._core: Core | None = None if verifier is None else verifier.core
        self._store = MetricsStore()
        #: The last fact of a drain whose decisions are not read yet.
        self._drained: Fact | None = None
        self._snapshot_due = header.s + SNAPSHOT_EVENTS

    @property
    def core(self) -> Core | None:
        """The core after the latest line, ahead of it by decisions that are not read yet."""
        return self._core

    def feed(self, line: LogLine) -> None:
        """Take the next line."""
        self.next_s = line.s + 1
        if self._verifier is None:
            self._feed_unverified(line.event())
            return
        event = self._verifier.feed(line)
        if event is None:
            return
        self.last_ns = event.ts
        core = self._verifier.core
        if core is not self._core:
            self._core = core
            self.gauges.forget()
            self.fold.resume(core.state)
            self._take_snapshot(core)
        elif isinstance(event, Fact):
            self._take(core, event)
        elif not isinstance(event, Snapshot):
            self.fold.see(event)

    def _take(self, core: Core, fact: Fact) -> None:
        assert self._verifier is not None
        decisions = list(self._verifier.expected)
        see = self.fold.see
        see(fact)
        for decision in decisions:
            see(decision)
        for decision in decisions:
            if isinstance(decision, Admitted) and decision.request in core.state.requests:
                self.fold.note_best_hit(decision.request, *_best_hit(core.state, decision.request))
        self.gauges.note(core.state, fact, decisions)
        if fact.p:
            self.gauges.sample(core.state, fact.s, self.fold.num_live)
            if core.next_seq >= self._snapshot_due:
                self._take_snapshot(core)

    def _take_snapshot(self, core: Core) -> None:
        compressed = zlib.compress(core.snapshot(), _COMPRESSION_LEVEL)
        self.snapshots.append(CoreSnapshot(core.next_seq, core.state.now_ns, compressed))
        self._snapshot_due = core.next_seq + SNAPSHOT_EVENTS

    def _feed_unverified(self, event: Event) -> None:
        if isinstance(event, Fact | Marker) and self._drained is not None:
            self._sample_metrics(event.s)
        self.last_ns = event.ts
        self.fold.see(event)
        self._store.apply(event)
        if isinstance(event, Fact) and event.p:
            self._drained = event

    def _sample_metrics(self, next_s: int) -> None:
        assert self._drained is not None
        self.gauges.sample_metrics(
            self._store, s=self._drained.s, next_s=next_s, ts=self._drained.ts, num_live=self.fold.num_live
        )
        self._drained = None

    def tables(self, *, is_ended: bool = True) -> dict[str, Table]:
        """The tables so far, by name. Not is_ended: without a drain whose decisions may not all be read."""
        if self._drained is not None and is_ended:
            self._sample_metrics(self.next_s)
        self.fold.end_open_stretches()
        fold, gauges = self.fold, self.gauges
        growing = (
            fold.requests,
            fold.phases,
            fold.stretches,
            fold.steps,
            fold.stages,
            fold.loads,
            fold.attempts,
            fold.marks,
            gauges.drains,
            gauges.gauges,
        )
        return {table.schema.name: table.finished() for table in growing}


def _best_hit(state: CoreState, request: int) -> tuple[int, int]:
    """The most leading tokens of a new request's prompt that a replica's cache holds, and which replica. One that it
    was admitted to at once holds its own blocks too: there count those that it hit.
    """
    sequence = state.requests[request].sequences[0]
    if sequence.arrival.scheduling.skip_cache_read:
        return 0, -1
    best = (0, -1)
    replicaset = state.set_of(sequence)
    block_size = replicaset.config.block_size
    for replica in replicaset.replicas:
        num_tokens = sequence.cached_tokens
        if not sequence.resident or sequence.replica != replica.index:
            path: list[Node] = []
            replica.pool.follow(sequence.block_names, sequence.max_hit_blocks(block_size), path)
            num_tokens = len(path) * block_size
        if num_tokens > best[0]:
            best = (num_tokens, replica.index)
    return best
