"""MetricsStore: a fold over the log to request, step, replica and component metrics.

    live      bus.attach(store.apply)
    offline   for line in LogReader(path): store.apply(line.event())

Both give the same store, because every value comes from an event. It keeps sums and live sequences, so its size does
not grow with the run. Rows of single sequences and steps go to a sink, if there is one. A log may begin with a later
segment and may lack events: sequences that were live there are measured no further, and ends of sequences whose
beginning is not in the log are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import UNSET

from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.core.state.sequence import State
from eventlm.core.state.snapshot import SequenceRow, StateSnapshot
from eventlm.events import (
    Admitted,
    Arrived,
    Closing,
    Desynced,
    Emitted,
    Event,
    Finished,
    GrammarReady,
    Header,
    Launched,
    PluginFailed,
    Preempted,
    Recovered,
    Rejected,
    Routed,
    StepCompleted,
    StepOps,
    WorkerLost,
    WorkerUp,
)
from eventlm.metrics.aggregates import MetricsSnapshot, ReplicaMetrics, SetOfReplicas
from eventlm.metrics.forwarded import ForwardFold
from eventlm.metrics.live import (
    Identity,
    LiveReplica,
    LiveRequestMetrics,
    LiveSequenceMetrics,
    Phase,
    observe_request,
    observe_step,
    producing_rows,
    request_row,
    shown_tokens,
)
from eventlm.metrics.rows import COMPLETED, UNFINISHED, Gauges, MetricsSink, RequestRow, StepRow
from eventlm.metrics.sequences import LiveSequences
from eventlm.metrics.service_classes import ClassSums


class MetricsStore:
    """`apply` takes events in the order of the log, the header first. `snapshot` is what they add up to."""

    def __init__(self, *, sink: MetricsSink | None = None) -> None:
        self._sink = sink
        self._header: Header | None = None
        self._next_s = self._num_events = self._num_requests = 0
        self._now_ns = 0
        self._num_unseen = 0
        self._num_cut = 0
        self._num_plugin_failures = 0
        self._classes = ClassSums()
        self._live = LiveSequences()
        self._replicas = self._live.replicas
        self._sets = [SetOfReplicas(0, "", 0)]
        #: Requests whose group is not complete, and those admitted.
        self._arriving: dict[int, LiveRequestMetrics] = {}
        self._requests: dict[int, LiveRequestMetrics] = {}
        self._sequences = self._live.sequences
        self._forwards = ForwardFold(self._live, sink)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Header: self._begin,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Rejected: self._rejected,
            Routed: self._routed,
            GrammarReady: self._grammar_ready,
            Launched: self._launched,
            StepCompleted: self._step_completed,
            Emitted: self._emitted,
            Preempted: self._preempted,
            Closing: self._closing,
            Finished: self._finished,
            WorkerUp: self._worker_up,
            WorkerLost: self._worker_lost,
            Desynced: self._worker_lost,
            Recovered: self._recovered,
            PluginFailed: self._plugin_failed,
            StepOps: self._step_ops,
            **self._forwards.handlers,
        }

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def unfinished(self, num_tokens: Mapping[Identity, int] | None = None) -> list[RequestRow]:
        """A row for each sequence that has not ended, in the order of their arrivals, as of the last event.

        num_tokens: output tokens of each, which the store counts of forwarded ones only; without it others have 0.
        """
        known = num_tokens or {}
        for replica in self._replicas:
            replica.token_times.update_members()
        return [
            request_row(
                sequence,
                UNFINISHED,
                self._now_ns,
                output_tokens=known.get(identity, sequence.output_tokens),
                cached_tokens=sequence.cached_tokens,
            )
            for identity, sequence in sorted(self._sequences.items())
        ]

    def backend_name(self, replica: int) -> str:
        """The address of the server that a replica stands for; empty if the log has not told it."""
        backend = self._replicas[replica].metrics.backend
        return "" if backend is None else backend.name

    @property
    def next_s(self) -> int:
        """The position after the last event taken in."""
        return self._next_s

    @property
    def gauges(self) -> list[Gauges]:
        """Each replica as it is now."""
        return [
            Gauges(metrics.num_running, metrics.num_waiting, metrics.num_held_blocks, tuple(metrics.group_held_blocks))
            for metrics in (replica.metrics for replica in self._replicas)
        ]

    def apply(self, event: Event) -> None:
        """Add the next event. Raises ValueError if the first is not a header."""
        if event.s < self._next_s:
            # It came before what was taken up.
            return
        if event.s != self._next_s:
            self._skip_gap()
        self._next_s = event.s + 1
        self._num_events += 1
        self._now_ns = event.ts
        handler = self._handlers.get(type(event))
        if handler is not None:
            if self._header is None and not isinstance(event, Header):
                raise ValueError(f"the log begins with event {event.s}, which is not a header")
            handler(event)

    def take_up(self, header: Header, taken: StateSnapshot, launches: Iterable[Launched]) -> None:
        """Begin in the middle of a run, with what is live in a snapshot. launches: of the steps in flight there.

        What came before is not known: a sequence that has tokens gets no time of a first one, and for one that was
        preempted before, all time until its next launch counts as queue.
        """
        self._begin(header)
        self._next_s, self._now_ns = taken.next_seq, taken.now_ns
        for request in taken.requests:
            arrival = request.arrival
            live = self._request(arrival)
            live.num_unfinished = len(request.sequences)
            self._requests[arrival.s] = live
            self._num_requests += not live.is_branch
            for row in request.sequences:
                self._take_up(live, row, taken.now_ns)
        for index, replica in enumerate(taken.replicas):
            self._replicas[index].epoch = replica.epoch
            self._replicas[index].metrics.is_up = replica.up
        for launched in launches:
            self._replicas[launched.replica].launches[launched.s] = launched
        self._forwards.take_up(taken)

    def _take_up(self, live: LiveRequestMetrics, row: SequenceRow, now_ns: int) -> None:
        sequence = LiveSequenceMetrics(
            request=live,
            identity=(live.seq, row.index),
            waits_for_grammar=row.state is State.WAITING_FOR_GRAMMAR,
            home=row.home,
            replica=row.replica,
            next_position=row.launched_tokens,
            cached_tokens=row.cached_tokens,
        )
        self._sequences[sequence.identity] = sequence
        if row.num_tokens > live.prompt_tokens:
            sequence.last_token_ns = now_ns
            sequence.output_tokens = (row.num_tokens - live.prompt_tokens) * live.is_forwarded
        if row.state is State.CLOSING:
            sequence.phase, sequence.held_until_ns = Phase.ENDING, now_ns
        elif row.state in (State.PREFILL, State.DECODE):
            sequence.phase = Phase.RUNNING
            replica = self._replicas[row.replica]
            replica.metrics.num_running += 1
            if not live.is_forwarded:
                replica.write_blocks(sequence.table, 0, row.block_table)
        else:
            self._live.count_waiting(sequence, 1)

    def snapshot(self) -> MetricsSnapshot:
        """A copy of all sums and gauges."""
        first, *others = self._sets
        return MetricsSnapshot(
            model=first.model,
            num_blocks=first.num_blocks,
            layout=first.layout,
            forwards=first.forwards,
            num_events=self._num_events,
            duration_ns=self._now_ns - (self._header.ts if self._header is not None else 0),
            num_requests=self._num_requests,
            num_unseen=self._num_unseen,
            num_cut=self._num_cut,
            num_plugin_failures=self._num_plugin_failures,
            replicas=[replica.metrics.copy() for replica in self._replicas],
            classes=self._classes.snapshot(),
            others=others,
        )

    def _begin(self, header: Header) -> None:
        if self._header is not None:
            return
        self._header = header
        self._sets = []
        layouts = recorded_layouts(header)
        for each in header.sets:
            core, first = each.core, len(self._replicas)
            forwards = core.forwards is not UNSET
            self._sets.append(SetOfReplicas(first, core.models[0], core.blocks_per_replica, layouts[first], forwards))
            self._replicas += [LiveReplica(ReplicaMetrics.of(core), core) for _ in range(core.num_replicas)]
            self._forwards.begin(first, core.num_replicas, each.host)

    def _skip_gap(self) -> None:
        """Events are missing. Sequences that were live before them may have ended since, so drop them all."""
        self._num_cut += len(self._sequences)
        for sequence in list(self._sequences.values()):
            self._live.leave_phase(sequence)
            sequence.end_attempts()
        self._sequences.clear()
        self._requests.clear()
        self._arriving.clear()
        for replica in self._replicas:
            replica.lose_worker()

    def _of(self, index: int) -> ReplicaMetrics:
        """Sums of a replica; the first one for what belongs to none."""
        return self._replicas[max(index, 0)].metrics

    def _request(self, arrival: Arrived) -> LiveRequestMetrics:
        of_set = self._sets[arrival.replicaset]
        return LiveRequestMetrics(
            arrival.s,
            arrival.ts,
            arrival.prompt_tokens,
            arrival.n,
            arrival.scheduling,
            of_set.first,
            of_set.forwards,
        )

    def _arrived(self, event: Arrived) -> None:
        if not event.scheduling.is_branch:
            self._num_requests += 1
            self._classes.arrived(event)
        self._arriving[event.s] = self._request(event)

    def _rejected(self, event: Rejected) -> None:
        if (request := self._arriving.pop(event.request, None)) is not None:
            _count(self._of(request.first_replica).reject_reasons, event.reason)
            self._classes.rejected(request.scheduling, request.n, event.reason)

    def _admitted(self, event: Admitted) -> None:
        request = self._arriving.pop(event.request, None)
        if request is None:
            return
        self._requests[request.seq] = request
        request.num_unfinished = request.n
        for index in range(request.n):
            sequence = LiveSequenceMetrics(
                request=request,
                identity=(request.seq, index),
                waits_for_grammar=request.scheduling.waits_for_grammar,
            )
            self._sequences[sequence.identity] = sequence
            self._live.count_waiting(sequence, 1)

    def _grammar_ready(self, event: GrammarReady) -> None:
        for sequence in self._samples_of(event.request):
            if sequence.waits_for_grammar:
                self._live.count_waiting(sequence, -1)
                sequence.waits_for_grammar = False
                self._live.count_waiting(sequence, 1)

    def _samples_of(self, request: int) -> list[LiveSequenceMetrics]:
        live = self._requests.get(request)
        indices = range(live.n) if live is not None else range(0)
        return [self._sequences[request, index] for index in indices if (request, index) in self._sequences]

    def _routed(self, event: Routed) -> None:
        for sequence in self._samples_of(event.request):
            if event.index in (-1, sequence.identity[1]):
                self._live.set_home(sequence, event.replica)

    def _launched(self, event: Launched) -> None:
        replica = self._replicas[event.replica]
        replica.launches[event.s] = event
        if not replica.metrics.is_up:
            # It came up before the beginning of the log.
            replica.metrics.is_up = True
            replica.epoch = event.epoch
        for request, index, position, num_tokens, _ in event.chunks:
            sequence = self._sequences.get((request, index))
            if sequence is not None:
                if sequence.phase is Phase.WAITING:
                    self._start_running(sequence, event)
                self._note_chunk(sequence, replica.metrics, position, num_tokens)
        num_decodes = len(event.decodes)
        for row, slot, blocks in event.blocks:
            in_row = event.decodes[row] if row < num_decodes else event.chunks[row - num_decodes]
            sequence = self._sequences.get((in_row[0], in_row[1]))
            if sequence is not None:
                replica.write_blocks(sequence.table, slot, blocks)

    def _start_running(self, sequence: LiveSequenceMetrics, event: Launched) -> None:
        """Its first chunk since it waited."""
        is_first = sequence.launched_ns is None
        self._live.start_running(sequence, event.replica, event.ts)
        if is_first and not sequence.request.scheduling.skip_cache_read and not sequence.num_preemptions:
            self._of(event.replica).queried_tokens += sequence.request.prompt_tokens

    def _note_chunk(
        self, sequence: LiveSequenceMetrics, metrics: ReplicaMetrics, position: int, num_tokens: int
    ) -> None:
        """Tokens that a chunk skips were found in the cache; only a first residency counts, as in `Finished`."""
        if not sequence.num_preemptions:
            num_hit = position - sequence.next_position
            sequence.cached_tokens += num_hit
            metrics.hit_tokens += num_hit
            sequence.next_position = position + num_tokens

    def _step_completed(self, event: StepCompleted) -> None:
        replica = self._replicas[event.replica]
        launched = replica.launches.pop(event.c, None)
        replica.completed = None if launched is None else (launched, event)

    def _emitted(self, event: Emitted) -> None:
        replica = self._replicas[event.replica]
        if replica.completed is None:
            return
        (launched, fact), replica.completed = replica.completed, None
        metrics = replica.metrics
        rows = producing_rows(launched, fact.produced, event.dropped)
        gaps, first = replica.token_times.take(rows, self._sequences, event.ts)
        for sequence in first:
            self._live.first_token(sequence, metrics, event.ts)
        tokens = rows if len(rows) == event.num_tokens else shown_tokens(launched, fact.produced, event.dropped)
        row = StepRow(
            replica=fact.replica,
            step=fact.step,
            completed_ns=fact.ts,
            batch_size=len(launched.decodes) + len(launched.chunks),
            batch_num_tokens=launched.num_tokens,
            batch_execution_time=fact.end_ns - fact.start_ns,
            busy_ns=fact.busy_ns,
            predicted_ns=launched.predicted_ns,
            inter_batch_delay=replica.end_step(launched, fact),
            tokens=tokens,
            token_gaps=gaps,
            stages=fact.stages,
            stage_waits_ns=replica.stage_waits.take(fact.stages),
            loads=launched.loads,
        )
        observe_step(row, metrics)
        metrics.generation_tokens += event.num_tokens
        if self._sink is not None:
            self._sink.step_completed(row)

    def _preempted(self, event: Preempted) -> None:
        _count(self._of(event.replica).preempt_reasons, event.reason)
        sequence = self._sequences.get((event.request, event.index))
        if sequence is None:
            return
        sequence.num_preemptions += 1
        # By the log, a sequence that was admitted and had no chunk yet has not run.
        if sequence.phase is Phase.RUNNING:
            self._live.stop_running(sequence, event.ts)

    def _closing(self, event: Closing) -> None:
        sequence = self._sequences.get((event.request, event.index))
        if sequence is not None:
            self._live.end_phase(sequence, event.ts)

    def _finished(self, event: Finished) -> None:
        sequence = self._sequences.pop((event.request, event.index), None)
        if sequence is None:
            self._num_unseen += 1
            return
        if sequence.phase is not Phase.ENDING:
            self._live.end_phase(sequence, event.ts)
        request = sequence.request
        request.num_unfinished -= 1
        if not request.num_unfinished:
            del self._requests[request.seq]
        replica = self._replicas[sequence.counted_under]
        replica.token_times.leave(sequence.identity)
        metrics = replica.metrics
        output_tokens, cached_tokens = event.position, event.cached_tokens
        if request.is_forwarded:
            output_tokens = event.position if request.generates else 0
            cached_tokens = self._forwards.finish(sequence, event)
        row = request_row(sequence, event.reason, event.ts, output_tokens=output_tokens, cached_tokens=cached_tokens)
        if not request.is_branch:
            self._count_end(row, sequence, metrics)
        if self._sink is not None:
            self._sink.request_ended(row)

    def _count_end(self, row: RequestRow, sequence: LiveSequenceMetrics, metrics: ReplicaMetrics) -> None:
        request, reason, now_ns = sequence.request, row.reason, row.finished_ns
        self._classes.ended(row)
        _count(metrics.finish_reasons, reason)
        if reason == "complete":
            self._live.prefill_done(sequence, metrics, now_ns)
        if reason in COMPLETED:
            observe_request(row, metrics)
            request.max_output_tokens = max(request.max_output_tokens or 0, row.output_tokens)
        elif request.deadline_ns and sequence.first_token_ns is None:
            due_ns = request.arrived_ns + request.deadline_ns
            metrics.num_deadlines_missed += reason == "deadline" or due_ns <= now_ns
        if not request.num_unfinished and request.max_output_tokens is not None:
            metrics.histograms["request_max_num_generation_tokens"].observe(request.max_output_tokens)

    def _worker_up(self, event: WorkerUp) -> None:
        replica = self._replicas[event.replica]
        if event.epoch <= replica.epoch:
            return
        if replica.metrics.is_up:
            self._worker_gone(event.replica)
        replica.epoch = event.epoch
        replica.metrics.is_up = True

    def _worker_lost(self, event: WorkerLost | Desynced) -> None:
        replica = self._replicas[event.replica]
        if event.epoch < replica.epoch:
            return
        replica.epoch = event.epoch
        if replica.metrics.is_up:
            self._worker_gone(event.replica)

    def _worker_gone(self, index: int) -> None:
        self._replicas[index].metrics.num_workers_lost += 1
        self._lose(index)

    def _recovered(self, event: Recovered) -> None:
        """Its workers are no more, but none of them died of itself."""
        for index, replica in enumerate(self._replicas):
            if replica.metrics.is_up and not replica.core.forwards:
                self._lose(index)
        self._forwards.lose()

    def _lose(self, index: int) -> None:
        """Sequences that waited for the replica, or ran on it, now wait for any."""
        replica = self._replicas[index]
        replica.metrics.is_up = False
        replica.lose_worker()
        for sequence in self._sequences.values():
            if sequence.home == index:
                self._live.set_home(sequence, -1)

    def _plugin_failed(self, event: PluginFailed) -> None:
        self._num_plugin_failures += 1

    def _step_ops(self, event: StepOps) -> None:
        op_ns = self._of(event.replica).op_ns
        for name, ns in event.ops.items():
            op_ns[name] = op_ns.get(name, 0) + ns


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
