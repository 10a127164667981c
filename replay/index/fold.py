"""Turns the events of a run into the tables of its index: requests, phases, stretches, steps and marks.

It needs nothing but the events, so it serves verified runs and those that cannot be verified. Where a log begins in the
middle of a run, or goes on after a gap, the core's state says what was under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.core.shards import Layout
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State
from eventlm.events import (
    Admitted,
    Arrived,
    CacheFlushed,
    Cancelled,
    Closing,
    Desynced,
    Emitted,
    Event,
    Finished,
    FrontEndLost,
    Gap,
    Launched,
    Paused,
    PluginFailed,
    PolicySwapped,
    PredictorSwapped,
    Preempted,
    Recovered,
    Rejected,
    Resumed,
    StepCompleted,
    UserMark,
    WorkerLost,
    WorkerUp,
)
from eventlm.replay.index.attempts import AttemptsFold
from eventlm.replay.index.tables import (
    LOADS,
    MARKS,
    PHASES,
    REQUESTS,
    STAGES,
    STEPS,
    STRETCHES,
    GrowingTable,
    MarkKind,
    NameTable,
    SequencePhase,
)
from eventlm.types import SequenceId

Identity = tuple[int, int]
_WAITING = (SequencePhase.QUEUE, SequencePhase.PREEMPTED)
_NOT_SENT = (SequencePhase.QUEUE, SequencePhase.RETRY)
_COMPUTING_PROMPT = (SequencePhase.PREFILL, SequencePhase.RECOMPUTE)


class _Live:
    """A live sequence. row: in `requests`; phase_row: its phase under way. final: (replica, step) that ends its prompt.
    chunk_row, chunk_last: its latest stretch of chunks, and the last step of that.
    """

    __slots__ = (
        "chunk_last",
        "chunk_row",
        "final",
        "has_run",
        "identity",
        "is_generating",
        "phase",
        "phase_row",
        "prompt_tokens",
        "replica",
        "row",
    )

    def __init__(self, row: int, identity: Identity, *, is_generating: bool, prompt_tokens: int) -> None:
        self.row = row
        self.identity = identity
        self.has_run = False
        self.replica = -1
        self.is_generating = is_generating
        self.prompt_tokens = prompt_tokens
        self.phase = SequencePhase.QUEUE
        self.phase_row = -1
        self.final: tuple[int, int] | None = None
        self.chunk_row = -1
        self.chunk_last = -2


class RunFold:
    """Takes the events of a run in order. layouts: of its replicas, to name ranks by."""

    def __init__(self, names: NameTable, layouts: list[Layout] | None = None) -> None:
        self.names = names
        self._layouts = layouts or []
        self.requests = GrowingTable(REQUESTS)
        self.phases = GrowingTable(PHASES)
        self.stretches = GrowingTable(STRETCHES)
        self.steps = GrowingTable(STEPS)
        self.stages = GrowingTable(STAGES)
        self.loads = GrowingTable(LOADS)
        self.marks = GrowingTable(MARKS)
        self._forwards = AttemptsFold(self, names)
        self.attempts = self._forwards.attempts
        self._arriving: dict[int, Arrived] = {}
        self._live: dict[Identity, _Live] = {}
        #: By (replica, step): rows of steps in flight, and their decodes.
        self._flying: dict[tuple[int, int], int] = {}
        self._flying_decodes: dict[tuple[int, int], list[Identity]] = {}
        self._flying_chunks: dict[tuple[int, int], list[Identity]] = {}
        #: When each live sequence got its latest token.
        self._last_token_ns: dict[Identity, int] = {}
        #: Sequences whose prompts are done, but gave no token yet: a row may produce none.
        self._tokenless: set[Identity] = set()
        #: By replica: the epoch of its latest worker.
        self._epochs: dict[int, int] = {}
        #: By replica: the decodes of its latest step with their open stretches, and that step.
        self._decoding: dict[int, dict[Identity, int]] = {}
        self._last_step: dict[int, int] = {}
        self._completed: StepCompleted | None = None
        #: By (replica, step): sequences whose prompts it ends.
        self._finals: dict[tuple[int, int], list[tuple[Identity, int]]] = {}
        self._now_ns = 0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Rejected: self._rejected,
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
            Cancelled: self._cancelled,
            Gap: self._gap,
            PluginFailed: self._plugin_failed,
            PolicySwapped: lambda event: self.mark(event, MarkKind.POLICY, text=event.name),
            PredictorSwapped: lambda event: self.mark(event, MarkKind.PREDICTOR),
            Paused: lambda event: self.mark(event, MarkKind.PAUSED),
            Resumed: lambda event: self.mark(event, MarkKind.RESUMED),
            CacheFlushed: lambda event: self.mark(event, MarkKind.CACHE_FLUSHED),
            FrontEndLost: lambda event: self.mark(event, MarkKind.FRONT_END_LOST, replica=event.front_end),
            UserMark: lambda event: self.mark(event, MarkKind.NOTE, text=event.text),
            **self._forwards.handlers,
        }

    @property
    def num_live(self) -> int:
        """Sequences that have been admitted to the queue and not ended."""
        return len(self._live)

    def see(self, event: Event) -> None:
        """Take the next event."""
        self._now_ns = event.ts
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def find_row(self, request: int, index: int) -> int:
        """The row of a live sequence in `requests`, else -1."""
        live = self._live.get((request, index))
        return -1 if live is None else live.row

    def note_best_hit(self, request: int, num_tokens: int, replica: int) -> None:
        """The caches held so much of the prompt of a request that has just arrived."""
        index = 0
        while (row := self.find_row(request, index)) >= 0:
            self.requests.columns["best_hit_tokens"][row] = num_tokens
            self.requests.columns["best_hit_replica"][row] = replica
            index += 1

    def _arrived(self, event: Arrived) -> None:
        self._arriving[event.s] = event

    def _admitted(self, event: Admitted) -> None:
        arrival = self._arriving.pop(event.request, None)
        if arrival is None:
            return
        for index in range(arrival.n):
            live = self._add_request(arrival, index)
            received_ns = self.requests.columns["received_ns"][live.row]
            if received_ns < arrival.ts:
                self.phases.add(live.row, SequencePhase.EDGE, received_ns, arrival.ts, -1, -1, -1)
            self._begin(live, SequencePhase.QUEUE, arrival.ts)

    def _add_request(self, arrival: Arrived, index: int) -> _Live:
        scheduling = arrival.scheduling
        row = self.requests.add(
            arrival.s,
            index,
            arrival.n,
            self.names.position(scheduling.kind),
            self.names.position(scheduling.service_class),
            scheduling.priority,
            scheduling.session,
            min(scheduling.received_ns or arrival.ts, arrival.ts),
            arrival.ts,
            scheduling.deadline_ns,
            scheduling.slo_ttft_ns,
            scheduling.slo_tpot_ns,
            arrival.prompt_tokens,
            arrival.max_tokens,
            *(-1,) * 7,
            0,
            0,
            -1,
            -1,
            0,
            int(scheduling.is_branch),
            1,
            arrival.replicaset,
        )
        is_generating = scheduling.kind == "generate"
        live = _Live(row, (arrival.s, index), is_generating=is_generating, prompt_tokens=arrival.prompt_tokens)
        self._live[live.identity] = live
        return live

    def _rejected(self, event: Rejected) -> None:
        arrival = self._arriving.pop(event.request, None)
        if arrival is not None:
            live = self._add_request(arrival, 0)
            self._end(live, event, f"rejected: {event.reason}")
            del self._live[arrival.s, 0]
        self.mark(event, MarkKind.REJECTED, request=event.request, text=event.reason)

    def _begin(self, live: _Live, phase: SequencePhase, start_ns: int, replica: int = -1) -> None:
        """The phase under way ends, and another begins."""
        self._close(live, start_ns)
        live.phase = phase
        live.phase_row = self.phases.add(live.row, phase, start_ns, -1, replica, -1, -1)
        if phase is SequencePhase.DECODE:
            # Its first decode may have been launched before the prompt was done.
            stretch = self._decoding.get(replica, {}).get(live.identity, -1)
            if stretch >= 0:
                self._note_step(live, self.stretches.columns["first_step"][stretch])

    def _close(self, live: _Live, end_ns: int) -> None:
        if live.phase_row >= 0:
            self.phases.columns["end_ns"][live.phase_row] = end_ns
            self._note_last_decode(live)
            live.phase_row = -1

    def _note_last_decode(self, live: _Live) -> None:
        """Its open stretch of decodes goes on until the latest step."""
        if live.phase is SequencePhase.DECODE and live.identity in self._decoding.get(live.replica, {}):
            self._note_step(live, self._last_step[live.replica])

    def _note_step(self, live: _Live, step: int) -> None:
        if live.phase_row >= 0:
            columns = self.phases.columns
            if columns["first_step"][live.phase_row] < 0:
                columns["first_step"][live.phase_row] = step
            columns["last_step"][live.phase_row] = step

    def _launched(self, event: Launched) -> None:
        replica, step = event.replica, event.step
        self._flying[replica, step] = self.steps.add(
            replica,
            event.epoch,
            step,
            event.s,
            event.ts,
            *(-1,) * 5,
            len(event.decodes),
            len(event.chunks),
            event.num_tokens,
            event.predicted_ns,
            0,
        )
        for group, num_tokens in enumerate(event.loads):
            self.loads.add(replica, step, group, num_tokens)
        decodes = self._flying_decodes[replica, step] = [(request, index) for request, index, _, _ in event.decodes]
        self._flying_chunks[replica, step] = [(request, index) for request, index, _, _, _ in event.chunks]
        self._note_decodes(replica, step, decodes)
        for request, index, start, num_tokens, samples in event.chunks:
            live = self._live.get((request, index))
            if live is not None:
                self._note_chunk(event, live, start + num_tokens, num_tokens, samples)

    def _note_decodes(self, replica: int, step: int, decodes: list[Identity]) -> None:
        """Written for speed: most steps have the decodes of the step before."""
        before = self._decoding.get(replica, {})
        last_step = self._last_step.get(replica, -1)
        self._last_step[replica] = step
        now = dict.fromkeys(decodes, -1)
        if now.keys() == before.keys():
            return
        for identity in now:
            row = before.pop(identity, -1)
            if row < 0:
                live = self._live.get(identity)
                row = self.stretches.add(-1 if live is None else live.row, replica, step, -1, 0, 0)
                if live is not None and live.phase is SequencePhase.DECODE:
                    self._note_step(live, step)
            now[identity] = row
        for identity, row in before.items():
            self._end_stretch(row, last_step)
            live = self._live.get(identity)
            if live is not None and live.phase is SequencePhase.DECODE:
                self._note_step(live, last_step)
        self._decoding[replica] = now

    def _end_stretch(self, row: int, last_step: int) -> None:
        columns = self.stretches.columns
        columns["last_step"][row] = last_step
        columns["tokens"][row] = last_step - columns["first_step"][row] + 1

    def _note_chunk(self, event: Launched, live: _Live, end: int, num_tokens: int, samples: int) -> None:
        replica, step = event.replica, event.step
        if live.phase in _WAITING:
            is_first, live.has_run = not live.has_run, True
            if is_first:
                self.requests.columns["launched_ns"][live.row] = event.ts
            live.replica = self.requests.columns["replica"][live.row] = replica
            self._begin(live, SequencePhase.PREFILL if is_first else SequencePhase.RECOMPUTE, event.ts, replica)
        self._note_step(live, step)
        columns = self.stretches.columns
        if live.chunk_last == step - 1 and columns["replica"][live.chunk_row] == replica:
            columns["last_step"][live.chunk_row] = step
            columns["tokens"][live.chunk_row] += num_tokens
        else:
            live.chunk_row = self.stretches.add(live.row, replica, step, step, 1, num_tokens)
        live.chunk_last = step
        if samples or (not live.is_generating and end == live.prompt_tokens):
            live.final = (replica, step)
            position = next(number for number, chunk in enumerate(event.chunks) if chunk[:2] == live.identity)
            self._finals.setdefault((replica, step), []).append((live.identity, len(event.decodes) + position))

    def _step_completed(self, event: StepCompleted) -> None:
        self._completed = event

    def _emitted(self, event: Emitted) -> None:
        key = (event.replica, event.step)
        row = self._flying.pop(key, -1)
        completed, columns = self._completed, self.steps.columns
        if row >= 0 and completed is not None:
            columns["done_s"][row] = completed.s
            columns["start_ns"][row] = completed.start_ns
            columns["end_ns"][row] = completed.end_ns
            columns["completed_ns"][row] = event.ts
            columns["busy_ns"][row] = completed.busy_ns
            columns["emitted"][row] = event.num_tokens
            for stage, times_ns in enumerate(completed.stages):
                self.stages.add(*key, stage, *times_ns)
        decodes = self._flying_decodes.pop(key, [])
        chunks = self._flying_chunks.pop(key, [])
        if completed is not None:
            self._note_tokens([*decodes, *chunks], completed.produced, event)
        if self._tokenless:
            for position, identity in enumerate(decodes):
                if identity in self._tokenless:
                    self._note_first_token(identity, position, event.ts)
        for identity, position in self._finals.pop(key, ()):
            live = self._live.get(identity)
            if live is None or live.final != key:
                continue
            live.final = None
            self._note_first_token(identity, position, event.ts)
            if live.phase in _COMPUTING_PROMPT:
                self._begin(live, SequencePhase.DECODE, event.ts, event.replica)

    def _note_tokens(self, rows: list[Identity], produced: list[int], event: Emitted) -> None:
        """Written for speed: mostly each row of a step gives a token."""
        if event.dropped or 0 in produced:
            gone = dict(event.dropped)
            rows = [
                identity
                for row, (identity, num_tokens) in enumerate(zip(rows, produced, strict=False))
                if num_tokens > gone.get(row, 0)
            ]
        self._last_token_ns.update(dict.fromkeys(rows, event.ts))

    def _note_first_token(self, identity: Identity, position: int, now_ns: int) -> None:
        """The row at a position of a completed step may have given a sequence its first token."""
        live, completed = self._live.get(identity), self._completed
        if live is None or completed is None or not live.is_generating:
            return
        first_token_ns = self.requests.columns["first_token_ns"]
        if first_token_ns[live.row] >= 0:
            return
        if completed.produced[position]:
            first_token_ns[live.row] = now_ns
            self._tokenless.discard(identity)
        else:
            self._tokenless.add(identity)

    def note_sent(self, identity: Identity, replica: int, now_ns: int, *, goes_on: bool) -> None:
        """A sequence that waited has been sent to another server. goes_on: it has tokens already."""
        live = self._live.get(identity)
        if live is None or live.phase not in _NOT_SENT:
            return
        columns = self.requests.columns
        if not live.has_run:
            live.has_run = True
            columns["launched_ns"][live.row] = now_ns
        live.replica = columns["replica"][live.row] = replica
        self._begin(live, SequencePhase.DECODE if goes_on else SequencePhase.PREFILL, now_ns, replica)

    def note_answer(self, identity: Identity, replica: int, now_ns: int) -> bool:
        """Another server has brought tokens of a sequence; False if it is no sequence of tokens."""
        live = self._live.get(identity)
        if live is None:
            return False
        columns = self.requests.columns
        live.replica = columns["replica"][live.row] = replica
        if live.is_generating and columns["first_token_ns"][live.row] < 0:
            columns["first_token_ns"][live.row] = now_ns
        self._last_token_ns[identity] = now_ns
        if live.phase is SequencePhase.PREFILL:
            self._begin(live, SequencePhase.DECODE, now_ns, replica)
        return live.is_generating

    def note_retry(self, identity: Identity, now_ns: int) -> None:
        """A sequence waits to be sent to another server again."""
        live = self._live.get(identity)
        if live is not None:
            self._begin(live, SequencePhase.RETRY, now_ns)

    def _preempted(self, event: Preempted) -> None:
        live = self._live.get((event.request, event.index))
        if live is not None:
            self.requests.columns["preemptions"][live.row] += 1
            live.chunk_last = -2
            self._begin(live, SequencePhase.PREEMPTED, event.ts, event.replica)
        by_request, by_index = event.by or (-1, -1)
        self.mark(
            event,
            MarkKind.PREEMPTED,
            replica=event.replica,
            request=event.request,
            index=event.index,
            text=event.reason,
            by=(by_request, by_index),
        )

    def _closing(self, event: Closing) -> None:
        live = self._live.get((event.request, event.index))
        if live is not None:
            self._begin(live, SequencePhase.TEXT_END, event.ts)

    def _finished(self, event: Finished) -> None:
        live = self._live.pop((event.request, event.index), None)
        self._tokenless.discard((event.request, event.index))
        self._forwards.finish((event.request, event.index), event.ts)
        last_token_ns = self._last_token_ns.pop((event.request, event.index), -1)
        if live is not None:
            self._end(live, event, event.reason)
            self.requests.columns["last_token_ns"][live.row] = last_token_ns
            self.requests.columns["output_tokens"][live.row] = event.position if live.is_generating else 0
            self.requests.columns["cached_tokens"][live.row] = event.cached_tokens
        if event.reason == "error":
            self.mark(event, MarkKind.FAILED, request=event.request, index=event.index)

    def _end(self, live: _Live, event: Event, reason: str) -> None:
        self._close(live, event.ts)
        columns = self.requests.columns
        columns["ended_ns"][live.row] = event.ts
        columns["ended_s"][live.row] = event.s
        columns["reason"][live.row] = self.names.position(reason)

    def _worker_up(self, event: WorkerUp) -> None:
        if event.epoch <= self._epochs.get(event.replica, -1):
            return
        self._epochs[event.replica] = event.epoch
        self.mark(event, MarkKind.WORKER_UP, replica=event.replica)
        self._lose_steps(event.replica)

    def _worker_lost(self, event: WorkerLost | Desynced) -> None:
        if event.epoch < self._epochs.get(event.replica, -1):
            # An older worker, whose steps were lost before.
            return
        self._epochs[event.replica] = event.epoch
        kind = MarkKind.WORKER_LOST if isinstance(event, WorkerLost) else MarkKind.DESYNCED
        text = event.reason if isinstance(event, WorkerLost) else ""
        if event.rank >= 0 and self._layouts:
            text = f"{self._layouts[event.replica].name_of(event.rank)}: {text or 'another length of a sequence'}"
        self.mark(event, kind, replica=event.replica, text=text, rank=event.rank)
        self._lose_steps(event.replica)

    def _recovered(self, event: Recovered) -> None:
        self.mark(event, MarkKind.RECOVERED, text=event.reason, down_ns=event.down_ns)
        for replica in sorted({replica for replica, _ in self._flying}):
            self._lose_steps(replica)
        self._forwards.lose(event.ts)

    def _lose_steps(self, replica: int) -> None:
        for key in [key for key in self._flying if key[0] == replica]:
            del self._flying[key]
            self._flying_decodes.pop(key, None)
            self._flying_chunks.pop(key, None)
            self._finals.pop(key, None)

    def _cancelled(self, event: Cancelled) -> None:
        self.mark(event, MarkKind.CANCELLED, request=event.request, text=event.reason)

    def _plugin_failed(self, event: PluginFailed) -> None:
        self.mark(event, MarkKind.PLUGIN_FAILED, text=event.error, replicaset=event.replicaset)

    def _gap(self, event: Gap) -> None:
        self.mark(event, MarkKind.GAP, text=f"events {event.first} to {event.last} are missing: {event.reason}")

    def mark(
        self,
        event: Event,
        kind: MarkKind,
        *,
        replica: int = -1,
        request: int = -1,
        index: int = -1,
        text: str = "",
        by: tuple[int, int] = (-1, -1),
        rank: int = -1,
        replicaset: int = -1,
        down_ns: int = 0,
    ) -> None:
        """Note a point of the run."""
        position = self.names.position(text) if text else -1
        self.marks.add(event.s, event.ts, kind, replica, request, index, position, *by, rank, replicaset, down_ns)

    def resume(self, state: CoreState) -> None:
        """The log begins, or goes on after a gap, with a snapshot of this state."""
        last_ns, self._now_ns = self._now_ns, state.now_ns
        in_state = {s.id: s for request in state.requests.values() for s in request.sequences if not _has_ended(s)}
        for identity in [identity for identity in self._live if SequenceId(*identity) not in in_state]:
            live = self._live.pop(identity)
            self._close(live, last_ns)
            columns = self.requests.columns
            columns["ended_ns"][live.row] = last_ns
            columns["reason"][live.row] = self.names.position("unknown")
        self._forget_steps()
        known = set(self._live)
        for sequence in in_state.values():
            if sequence.id not in known:
                added = self._add_request(sequence.arrival, sequence.index)
                self.requests.columns["is_seen"][added.row] = 0
            live = self._live[sequence.id]
            live.has_run, live.final = sequence.residency > 0, None
        for replica in state.replicas:
            self._resume_steps(replica)
        self._forwards.resume(state)
        for sequence in in_state.values():
            live = self._live[sequence.id]
            self._close(live, last_ns)
            if sequence.id in known:
                self.phases.add(live.row, SequencePhase.UNSEEN, last_ns, state.now_ns, -1, -1, -1)
            live.replica = sequence.replica
            if state.set_of(sequence).forwards is not None:
                self._resume_forwarded(live, sequence, state.now_ns)
                continue
            self._begin(live, _phase_of(sequence, is_ending_prompt=live.final is not None), state.now_ns, live.replica)
            columns = self.requests.columns
            columns["replica"][live.row] = sequence.replica
            columns["output_tokens"][live.row] = sequence.num_output_tokens
            if live.phase is SequencePhase.DECODE and not sequence.num_output_tokens:
                self._tokenless.add(live.identity)

    def _resume_forwarded(self, live: _Live, sequence: Sequence, now_ns: int) -> None:
        columns = self.requests.columns
        columns["output_tokens"][live.row] = sequence.num_output_tokens if live.is_generating else 0
        if sequence.resident:
            columns["replica"][live.row] = sequence.replica
            phase = SequencePhase.DECODE if sequence.num_output_tokens else SequencePhase.PREFILL
        else:
            phase = SequencePhase.RETRY if sequence.residency else SequencePhase.QUEUE
        self._begin(live, phase, now_ns, sequence.replica if sequence.resident else -1)

    def _resume_steps(self, replica: Replica) -> None:
        self._epochs[replica.index] = replica.epoch
        for step in replica.in_flight:
            key = (replica.index, step.step)
            num_tokens = len(step.decodes) + sum(row.end - row.start for row in step.chunks)
            rows = (len(step.decodes), len(step.chunks), num_tokens, step.predicted_ns, 0)
            launch = (replica.index, replica.epoch, step.step, step.launch_seq)
            self._flying[key] = self.steps.add(*launch, *(-1,) * 6, *rows)
            decodes: list[Identity] = [sequence.id for sequence in step.decodes]
            self._flying_decodes[key] = decodes
            self._flying_chunks[key] = [chunk.sequence.id for chunk in step.chunks]
            self._note_decodes(*key, [identity for identity in decodes if identity in self._live])
            for position, chunk in enumerate(step.chunks, len(step.decodes)):
                if chunk.final and chunk.sequence.id in self._live:
                    self._live[chunk.sequence.id].final = key
                    self._finals.setdefault(key, []).append((chunk.sequence.id, position))

    def _forget_steps(self) -> None:
        """What was in flight before a gap is not known to have completed."""
        self.end_open_stretches()
        self._decoding.clear()
        self._last_step.clear()
        self._flying.clear()
        self._flying_decodes.clear()
        self._flying_chunks.clear()
        self._last_token_ns.clear()
        self._tokenless.clear()
        self._finals.clear()
        self._arriving.clear()

    def end_open_stretches(self) -> None:
        """Give stretches under way their last steps so far, and live sequences their latest tokens."""
        for replica, rows in self._decoding.items():
            for row in rows.values():
                self._end_stretch(row, self._last_step[replica])
        for live in self._live.values():
            self._note_last_decode(live)
            self.requests.columns["last_token_ns"][live.row] = self._last_token_ns.get(live.identity, -1)


def _has_ended(sequence: Sequence) -> bool:
    return sequence.state is State.FINISHED


def _phase_of(sequence: Sequence, *, is_ending_prompt: bool) -> SequencePhase:
    """The phase by the state of a sequence, and by whether its last chunk is in flight."""
    if sequence.ended:
        return SequencePhase.TEXT_END
    if not sequence.resident:
        return SequencePhase.PREEMPTED if sequence.residency else SequencePhase.QUEUE
    if sequence.state is State.DECODE and not is_ending_prompt:
        return SequencePhase.DECODE
    return SequencePhase.PREFILL if sequence.residency == 1 else SequencePhase.RECOMPUTE
