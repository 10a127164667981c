"""The simulator: the core and the loop of a live engine, with a virtual clock and a cost model instead of workers.

All facts that are due at one time form one tick of the loop. Decisions lead to further facts: a launch to its
completion, a token to a cancel or a text end, the end of a turn to the next. Facts of one time are ordered by rank (in
a repetition of a run their recorded positions), then by the order in which they were scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from msgspec import Raw, structs

from eventlm.core.core import Core
from eventlm.core.state.sequence import AdmittedRequest, State
from eventlm.engine.core_loop import CoreLoop, MakeFacts, Shell
from eventlm.events import (
    Admitted,
    BackendState,
    Cancelled,
    Closing,
    Decision,
    Emitted,
    End,
    Event,
    Fact,
    Finished,
    Forwarded,
    GrammarReady,
    Header,
    Launched,
    Marker,
    Recovered,
    Rejected,
    Relayed,
    Snapshot,
    StepCompleted,
    Streamed,
    TextEnded,
    Withdrawn,
)
from eventlm.replay.simulate.backends import SimulatedBackends
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.replay.simulate.requests import SimulatedRequests, SimulatedResult, Watched
from eventlm.replay.simulate.timing import StepTimes, Timing
from eventlm.replay.simulate.under_way import UnderWay
from eventlm.replay.workload.arrivals import ArrivalPlan, GroupArrival
from eventlm.replay.workload.workload import NEVER, Workload, WorkloadRequest, resize_request
from eventlm.system.collector import collector_off
from eventlm.types import OnProgress, SequenceId

#: Gets every event in the order of the log.
Subscriber = Callable[[Event], None]
#: Whether a scheduled fact still applies.
IsDue = Callable[[], bool]


class Simulator:
    """Runs a workload through a core that has applied nothing yet or, with `under_way`, is in the middle of a run. In
    that case the log begins with a snapshot.

    external_facts: facts of no request, with their times. A replica needs a WorkerUp to work.
    closed_loop, pauses_ns: see `ArrivalPlan`.
    under_way: the workload is then `remaining_work`, and external facts are those after it.
    until_s: repeat a recorded run and stop before this position. `markers` then have their recorded positions.
    checkpoint_events: events between two digests of the state in the log; 0: no digests.
    """

    def __init__(
        self,
        header: Header,
        core: Core,
        workload: Workload,
        timing: Timing,
        *,
        external_facts: Sequence[Fact] = (),
        closed_loop: int = 0,
        pauses_ns: Sequence[int] = (),
        markers: Sequence[Marker] = (),
        until_s: int = NEVER,
        checkpoint_events: int = 0,
        subscribers: Sequence[Subscriber] = (),
        under_way: UnderWay | None = None,
    ) -> None:
        self.core = core
        #: Requests that have ended or were rejected.
        self.num_ended = 0
        self._timing = timing
        self._workload = workload
        self._subscribers = subscribers
        self._until_s = until_s
        self._cores = [each.core for each in header.sets]
        self._live = SimulatedRequests(
            block_sizes=[core.block_size for core in self._cores], first_free_name=_first_free_name(workload, header)
        )
        self._clock = VirtualClock(core.state.now_ns)
        self._loop = CoreLoop(
            core,
            self._clock,
            Shell(self._take_fact, self._change_worker, self._carry_out, self._publish, self._take_markers),
            checkpoint_events=checkpoint_events,
            fires_timers=timing.fires_timers,
        )
        self._backends = SimulatedBackends(timing.backends() or [None] * header.num_replicas, self)
        #: The future result of each launch in flight, by its seq.
        self._results: dict[int, tuple[SimulatedResult, StepTimes]] = {}
        #: Watched positions that the completion being applied reaches, by row.
        self._watched: list[tuple[int, Watched]] = []
        #: The epoch of each replica's worker, None where there is none.
        self._workers: list[int | None] = [None] * header.num_replicas
        #: The index in the workload of each request that has arrived, by its seq.
        self.workload_index: dict[int, int] = {}
        #: Number of unfinished sequences of each live request.
        self._num_unended: dict[int, int] = {}
        #: Live requests without a token whose clients may still run out of patience.
        self._patient: set[int] = set()
        self._markers = list(reversed(markers))
        self._handlers: dict[type[Decision], Callable[[Any], None]] = {
            Launched: self._launched,
            Emitted: self._emitted,
            Admitted: self._admitted,
            Closing: self._closing,
            Finished: self._finished,
            Rejected: self._rejected,
            Forwarded: self._forwarded,
            Relayed: self._relayed,
            Withdrawn: self._backends.withdraw,
        }
        if until_s == NEVER:
            self._loop.mark(header)
        num_arrived = len(under_way.seqs) if under_way is not None else 0
        self._plan = ArrivalPlan(workload, closed_loop=closed_loop, pauses_ns=pauses_ns, num_arrived=num_arrived)
        if under_way is not None:
            self._resume(under_way)
        for fact in external_facts:
            self._at(fact.ts, fact.s, lambda seq, ts, fact=fact: [self._at_present(fact)])  # type: ignore[misc]
        self._plan_arrivals(self._plan.first())

    @property
    def num_unfinished(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._num_unended)

    def _resume(self, under_way: UnderWay) -> None:
        """Take up what the core's state and the recorded run say is under way."""
        state = self.core.state
        if self._until_s == NEVER:
            self._loop.mark(Snapshot(state=Raw(self.core.snapshot())))
        for index, seq in enumerate(under_way.seqs):
            admitted, request = state.requests[seq], self._workload.requests[index]
            self.workload_index[seq] = index
            self._num_unended[seq] = admitted.num_unfinished
            self._live.resume(request, admitted)
            self._resume_request(request, admitted, under_way.fact_times_ns)
        self._backends.resume(state, {seq: self._workload.requests[n] for n, seq in enumerate(under_way.seqs)})
        self._workers = [replica.worker for replica in state.replicas]
        for launched in under_way.launches:
            self._launched(launched)

    def _resume_request(
        self, request: WorkloadRequest, admitted: AdmittedRequest, fact_times_ns: Mapping[int, int]
    ) -> None:
        """Schedule what has been caused and not applied yet: ends in the texts, a cancel, the end of the client's
        patience, a grammar.
        """
        seq, arrived_ns = admitted.arrival.s, admitted.arrival.ts
        # The state has no lengths of finished sequences, which have had all their tokens.
        num_tokens = [
            NEVER if sequence.state is State.FINISHED else sequence.num_output_tokens for sequence in admitted.sequences
        ]
        for sequence, output in zip(admitted.sequences, request.outputs, strict=True):
            if sequence.state is State.FINISHED:
                continue
            index, end, position = sequence.index, output.text_end, sequence.num_output_tokens
            if end is not None and end.position <= position and end.s in fact_times_ns:
                self._plan_text_end(seq, index, end.position, end.reason, fact_times_ns[end.s], end.s)
            if sequence.state is State.CLOSING and (end is None or end.position > position):
                if output.answer_s in fact_times_ns:
                    self._plan_text_end(seq, index, position, "", fact_times_ns[output.answer_s], output.answer_s)
                elif self._until_s == NEVER:
                    self._plan_text_end(seq, index, position, "", 0, 0)
        cancel = request.cancel
        if cancel is not None and cancel.position <= num_tokens[cancel.index] and cancel.s in fact_times_ns:
            self._plan_cancel(seq, cancel.reason, fact_times_ns[cancel.s], cancel.s, self._num_unended)
        if not any(num_tokens):
            self._plan_patience(request, seq, arrived_ns)
        if any(sequence.state is State.WAITING_FOR_GRAMMAR for sequence in admitted.sequences):
            self._plan_grammar(request, seq, arrived_ns)

    def run(self, *, on_progress: OnProgress | None = None) -> None:
        """Run to the end. `on_progress` gets how many requests have ended, and their total."""
        # What a run leaves behind has no cycles, and with many replicas there is much to look for them in.
        with collector_off():
            self._run(on_progress)

    def _run(self, on_progress: OnProgress | None) -> None:
        num_requests, num_drains = len(self._workload.requests), 0
        self._take_markers()
        while self._clock.has_more and self.core.next_seq < self._until_s:
            self._loop.drain(self._clock.advance())
            num_drains += 1
            if on_progress is not None and num_drains % 1024 == 0:
                on_progress(self.num_ended, num_requests)
        if on_progress is not None:
            on_progress(self.num_ended, num_requests)

    def end(self, reason: str = "stop") -> None:
        """Append the markers of a clean end."""
        self._loop.checkpoint()
        self._loop.mark(End(reason=reason))

    def now_ns(self) -> int:
        """The present time of the run."""
        return self._clock.now_ns()

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time that has not passed."""
        self._clock.at(due_ns, action)

    def put(self, fact: Fact) -> None:
        """Apply a fact with the others of the present time."""
        self._loop.put_fact(fact)

    def _at_present(self, fact: Fact) -> Fact:
        """A fact from outside as it is in this engine."""
        return self._backends.measured(fact) if isinstance(fact, BackendState) else fact

    def _at(self, time_ns: int, rank: int, make: MakeFacts, is_due: IsDue | None = None) -> None:
        """Schedule facts, which are dropped if they no longer apply then."""
        time_ns = max(time_ns, self._clock.now_ns())
        if is_due is None:
            self._clock.at(time_ns, lambda: self._loop.put(make), rank)
        else:
            self._clock.at(time_ns, lambda: self._loop.put(make) if is_due() else None, rank)

    def _take_fact(self, fact: Fact) -> None:
        if isinstance(fact, Streamed):
            self._backends.stream(fact)
        elif isinstance(fact, Recovered):
            self._backends.lose()
        self._publish(fact)

    def _publish(self, event: Event) -> None:
        for see in self._subscribers:
            see(event)

    def _carry_out(self, decision: Decision) -> None:
        for see in self._subscribers:
            see(decision)
        handler = self._handlers.get(type(decision))
        if handler is not None:
            handler(decision)

    def _take_markers(self) -> None:
        """Insert the markers of a repeated run at their positions."""
        while self._markers and self._markers[-1].s == self.core.next_seq:
            self._loop.mark(self._markers.pop())

    def _plan_arrivals(self, arrivals: list[GroupArrival]) -> None:
        for group, arrival_ns in arrivals:
            rank = self._workload.requests[group.start].s
            self._at(arrival_ns, rank, lambda seq, ts, group=group: self._arrive(group, seq, ts))  # type: ignore[misc]

    def _arrive(self, group: range, seq: int, ts: int) -> list[Fact]:
        facts: list[Fact] = []
        for index in group:
            request = self._workload.requests[index]
            core = self._cores[request.arrival.replicaset]
            request = resize_request(
                request, from_size=request.block_size or self._workload.block_size, to_size=core.block_size
            )
            arrival, recorded = request.arrival, request.arrival.scheduling
            facts.append(
                structs.replace(
                    arrival,
                    c=0,
                    scheduling=structs.replace(
                        recorded,
                        model=recorded.model or core.models[0],
                        received_ns=max(ts - request.received_before_ns, 0) if recorded.received_ns else 0,
                        ready_ns=max(ts - request.ready_before_ns, 0) if recorded.ready_ns else 0,
                    ),
                )
            )
            own = seq + index - group.start
            self.workload_index[own] = index
            self._num_unended[own] = arrival.n
            self._live.admit(request, own, len(arrival.blocks))
        return facts

    def _launched(self, launched: Launched) -> None:
        times = self._timing.step(launched)
        if times is None:
            return
        s = launched.s
        self._results[s] = (self._live.result(launched), times)
        self._at(times.completed_ns, times.rank, lambda seq, ts: [self._complete(s)], lambda: s in self._results)

    def _complete(self, s: int) -> StepCompleted:
        result, times = self._results.pop(s)
        launched = result.launched
        completion = self._live.complete(result)
        self._watched = completion.watched
        return StepCompleted(
            c=s,
            replica=launched.replica,
            epoch=launched.epoch,
            step=launched.step,
            start_ns=times.start_ns,
            end_ns=times.end_ns,
            stages=list(times.stages),
            produced=result.produced,
            ends=completion.ends,
            filled=completion.filled,
        )

    def _change_worker(self, index: int, decisions: Sequence[Decision]) -> None:
        """Discard the results of a lost worker."""
        worker = self.core.state.replicas[index].worker
        if worker == self._workers[index]:
            return
        self._workers[index] = worker
        for s, (result, _) in list(self._results.items()):
            launched = result.launched
            if launched.replica == index and launched.epoch != worker:
                self._live.discard(result)
                del self._results[s]
        self._timing.worker_up(index, self.core.state.now_ns)

    def _emitted(self, emitted: Emitted) -> None:
        if not self._watched:
            return
        dropped = dict(emitted.dropped)
        watched, self._watched = self._watched, []
        for row, (sample, position) in watched:
            if row not in dropped:
                self._reached(sample.request, sample.seq, sample.index, position, emitted.ts)

    def _forwarded(self, forwarded: Forwarded) -> None:
        number = self.workload_index[forwarded.request]
        self._backends.forward(forwarded, self._workload.requests[number], number)

    def _relayed(self, relayed: Relayed) -> None:
        for (seq, index), before, total in self._backends.relay(relayed):
            request = self._workload.requests[self.workload_index[seq]]
            left = request.cancel.position if request.cancel is not None and request.cancel.index == index else 0
            for position in {1: None, left: None}:
                if before < position <= total:
                    self._reached(request, seq, index, position, relayed.ts)

    def _admitted(self, admitted: Admitted) -> None:
        seq, now_ns = admitted.request, admitted.ts
        request = self._workload.requests[self.workload_index[seq]]
        for index in range(request.arrival.n):
            self._reached(request, seq, index, 0, now_ns)
        self._plan_patience(request, seq, now_ns)
        self._plan_grammar(request, seq, now_ns)

    def _plan_patience(self, request: WorkloadRequest, seq: int, arrived_ns: int) -> None:
        patience = request.patience
        if patience is not None:
            self._patient.add(seq)
            self._plan_cancel(seq, patience.reason, arrived_ns + patience.limit_ns, patience.s, self._patient)

    def _plan_grammar(self, request: WorkloadRequest, seq: int, arrived_ns: int) -> None:
        # A grammar whose result was not recorded is ready at once, unless the run is repeated.
        if request.grammar_s or (request.arrival.scheduling.waits_for_grammar and self._until_s == NEVER):
            error = request.grammar_error
            self._at(
                arrived_ns + request.grammar_delay_ns,
                request.grammar_s,
                lambda _, ts: [GrammarReady(request=seq, error=error)],
                lambda: seq in self._num_unended,
            )

    def _reached(self, request: WorkloadRequest, seq: int, index: int, position: int, now_ns: int) -> None:
        """A sequence has reached a watched position."""
        output, cancel = request.outputs[index], request.cancel
        end = output.text_end
        if end is not None and end.position == position:
            self._plan_text_end(seq, index, end.position, end.reason, now_ns + end.delay_ns, end.s)
        if cancel is not None and (cancel.index, cancel.position) == (index, position):
            self._plan_cancel(seq, cancel.reason, now_ns + cancel.delay_ns, cancel.s, self._num_unended)
        if position == 1:
            self._patient.discard(seq)

    def _plan_text_end(self, seq: int, index: int, position: int, reason: str, due_ns: int, rank: int) -> None:
        fact = TextEnded(c=seq, request=seq, index=index, position=position, reason=reason)
        self._at(due_ns, rank, lambda _, ts: [fact], lambda: seq in self._num_unended)

    def _plan_cancel(self, seq: int, reason: str, due_ns: int, rank: int, due: Container[int]) -> None:
        """The client leaves if the request is still in `due` then."""
        fact = Cancelled(c=seq, request=seq, reason=reason)
        self._at(due_ns, rank, lambda _, ts: [fact], lambda: seq in due)

    def _closing(self, closing: Closing) -> None:
        self._live.leave(closing.request, closing.index)
        output = self._workload.requests[self.workload_index[closing.request]].outputs[closing.index]
        # A text end at an earlier position is already scheduled.
        is_open = output.text_end is None or output.text_end.position > closing.position
        if is_open and (output.answer_delay_ns is not None or self._until_s == NEVER):
            due_ns = closing.ts + (output.answer_delay_ns or 0)
            self._plan_text_end(closing.request, closing.index, closing.position, "", due_ns, output.answer_s)

    def _finished(self, finished: Finished) -> None:
        seq = finished.request
        self._live.leave(seq, finished.index)
        self._backends.finish(SequenceId(seq, finished.index))
        self._num_unended[seq] -= 1
        if not self._num_unended[seq]:
            self._end(seq, finished.ts)

    def _rejected(self, rejected: Rejected) -> None:
        self._live.forget(rejected.request)
        self._end(rejected.request, rejected.ts)

    def _end(self, seq: int, now_ns: int) -> None:
        del self._num_unended[seq]
        self._patient.discard(seq)
        self.num_ended += 1
        self._plan_arrivals(self._plan.ended(self.workload_index[seq], now_ns))


def _first_free_name(workload: Workload, header: Header) -> int:
    """Larger than all names of the arrivals' blocks after resizing."""
    largest = max([workload.block_size, *(request.block_size for request in workload.requests)])
    parts = max(largest // min(each.core.block_size for each in header.sets), 1)
    return (workload.first_free_name + 1) * parts + 1
