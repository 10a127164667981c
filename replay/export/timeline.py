"""Writes a run for trace viewers in one pass through the log: phases of sequences, steps, and counters of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Event, Header, Snapshot
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.export.chrome import ChromeWriter
from eventlm.replay.export.perfetto import PerfettoWriter
from eventlm.replay.kept_input import check_keeps_input
from eventlm.system.whole_file import whole_file
from eventlm.telemetry.phases import PhaseFold, PhaseSink
from eventlm.types import NANOSECONDS_PER_SECOND, OnProgress, TimeWindow

TimelineFormat = Literal["perfetto", "chrome"]


class TimelineWriter(PhaseSink, Protocol):
    """Draws what it gets. Events of one sequence, of one replica's steps and of one counter come in order of time."""

    def begin(self, header: Header) -> None:
        """The run begins."""
        ...

    def stages_ended(self, row: StepRow) -> None:
        """A step has been through all stages of a pipeline."""
        ...

    def counter(self, replica: int, name: str, ns: int, value: int) -> None:
        """A counter of a replica has this value from now on."""
        ...

    def end(self) -> None:
        """The run has ended."""
        ...


class ExportedTimeline(NamedTuple):
    """How many sequences and steps a file has that ended, and the trace's warnings."""

    num_sequences: int
    num_steps: int
    warnings: list[str]


class _Timeline:
    """Feeds a writer. Counters are those of the metrics store behind each drain, written where they change."""

    def __init__(self, writer: TimelineWriter, header: Header, window: TimeWindow | None) -> None:
        self.num_sequences = self.num_steps = 0
        self._writer = writer
        self._window = window
        self._cores = header.cores_of_replicas()
        self._now_ns = header.ts
        self._header = header
        self._store = MetricsStore(sink=self)
        self._phases = PhaseFold(writer, window=window)
        self._written: dict[tuple[int, str], int] = {}
        #: Since the begin of the current second, by replica and counter: tokens shown, and those of each KV group.
        self._num_tokens = self._no_tokens()

    def apply(self, event: Event) -> None:
        """The next event of the log."""
        if event.ts != self._now_ns:
            self._end_drain(event.ts)
        if isinstance(event, Snapshot) and event.s == self._header.s + 1:
            # What is live where the log begins counts, too.
            taken = msgspec.json.decode(event.state, type=StateSnapshot)
            self._store = MetricsStore(sink=self)
            self._store.take_up(self._header, taken, launches_in_flight(taken))
        self._store.apply(event)
        self._phases.apply(event)

    def finish(self) -> None:
        """After the last event."""
        self._end_drain(self._now_ns)
        self._end_second()
        self._phases.finish()
        self._writer.end()

    def _end_drain(self, next_ns: int) -> None:
        for replica, gauges in enumerate(self._store.gauges):
            self._count(replica, "waiting", self._now_ns, gauges.num_waiting)
            self._count(replica, "running", self._now_ns, gauges.num_running)
            core = self._cores[replica]
            if core.forwards:
                continue
            self._count(replica, "free blocks", self._now_ns, core.blocks_per_replica - gauges.num_held_blocks)
            for group, num_held in enumerate(gauges.group_held_blocks):
                self._count(replica, f"free blocks, group {group}", self._now_ns, core.num_blocks - num_held)
        second = self._now_ns // NANOSECONDS_PER_SECOND
        if next_ns // NANOSECONDS_PER_SECOND > second:
            self._end_second()
            if next_ns // NANOSECONDS_PER_SECOND > second + 1:
                for replica, name in self._num_tokens:
                    self._count(replica, name, (second + 1) * NANOSECONDS_PER_SECOND, 0)
        self._now_ns = next_ns

    def _end_second(self) -> None:
        start_ns = self._now_ns - self._now_ns % NANOSECONDS_PER_SECOND
        for (replica, name), num_tokens in self._num_tokens.items():
            self._count(replica, name, start_ns, num_tokens)
        self._num_tokens = self._no_tokens()

    def _no_tokens(self) -> dict[tuple[int, str], int]:
        found = {}
        for replica, core in enumerate(self._cores):
            found[replica, "tokens/s"] = 0
            for group in range(core.groups) if core.groups > 1 else ():
                found[replica, _group_tokens(group)] = 0
        return found

    def _count(self, replica: int, name: str, ns: int, value: int) -> None:
        if self._window is not None and not self._window.has(ns):
            return
        if self._written.get((replica, name)) != value:
            self._written[replica, name] = value
            self._writer.counter(replica, name, ns, value)

    def request_ended(self, row: RequestRow) -> None:
        """Count it."""
        self.num_sequences += self._window is None or self._window.has(row.arrived_ns)

    def step_completed(self, row: StepRow) -> None:
        """Count its tokens."""
        is_wanted = self._window is None or self._window.overlaps(row.started_ns, row.completed_ns)
        self.num_steps += is_wanted
        self._num_tokens[row.replica, "tokens/s"] += len(row.tokens)
        for group, num_tokens in enumerate(row.loads):
            self._num_tokens[row.replica, _group_tokens(group)] += num_tokens
        if is_wanted and row.stages:
            self._writer.stages_ended(row)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Count them."""
        self._num_tokens[row.replica, "tokens/s"] += row.num_tokens


def _group_tokens(group: int) -> str:
    """A counter: what it computes, and not, as "tokens/s", what is shown."""
    return f"computed tokens/s, group {group}"


def export_timeline(
    path: Path | str,
    file: Path | str,
    *,
    to: TimelineFormat,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportedTimeline:
    """Write a trace, or a window of it, as one file for trace viewers.

    An existing file is replaced once the new one is whole. Raises UsageError if it cannot be written or is the trace,
    else as LogReader does.
    """
    check_keeps_input(file, path)
    with LogReader(path, strict=strict) as reader, whole_file(Path(file)) as out:
        writer: TimelineWriter = PerfettoWriter(out) if to == "perfetto" else ChromeWriter(out)
        writer.begin(reader.header)
        timeline = _Timeline(writer, reader.header, window)
        reader.fold(timeline.apply, on_progress=on_progress)
        timeline.finish()
        return ExportedTimeline(timeline.num_sequences, timeline.num_steps, reader.warnings())
