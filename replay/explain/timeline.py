"""The timeline of one sequence, split at the events of the log so that every nanosecond has one cause.

`cursor_ns` is the end of the last interval. After a drain, a sequence either waits or has rows in flight. If it waits,
the state gives the cause of the time until the next event. If it has rows in flight, the completions will show it: the
worker's start and end of each step, and of each stage of a pipeline, split the time since the cursor.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from eventlm.core.scheduler import waiting_head
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence, State, Urgency
from eventlm.core.state.step_plan import WaitReason
from eventlm.core.wait_reason import WaitWatch, urgency_now
from eventlm.events import Finished, Launched, Preempted, StepCompleted
from eventlm.metrics.live import StageWaits
from eventlm.replay.explain.result import Cause, Explanation, Interval, Order, Phase, Preemption, StepShare
from eventlm.types import SequenceId

#: Causes for which an interval names the sequences that were ahead.
_BEHIND_OTHERS = ("sequence_limit", "blocks", "token_budget", "head_of_line")


class TimelineRow(NamedTuple):
    """A row of a launch: `num_tokens` after `position`, 0 for a decode."""

    position: int
    num_tokens: int


class _Flight(NamedTuple):
    """A step in flight with a row of the sequence. is_final: the row ends the prompt."""

    launched: Launched
    row: TimelineRow
    is_final: bool
    residency: int


class _Wait:
    """An interval that is not over."""

    def __init__(self, reason: WaitReason, phase: Phase, limit: int, held_by: list[SequenceId]) -> None:
        self.reason = reason
        self.phase = phase
        self.limit = limit
        self.held_by = dict.fromkeys(held_by)
        self.admitted: dict[SequenceId, None] = {}
        self.steps: dict[int, None] = {}
        self.num_lacking = reason.num_lacking
        self.order: Order | None = None

    def goes_on(self, reason: WaitReason, phase: Phase) -> bool:
        """Whether the cause is unchanged."""
        before = self.reason
        same = (before.cause, before.replica, before.other) == (reason.cause, reason.replica, reason.other)
        return same and phase == self.phase


class Timeline:
    """`settle` is called after every drain, the other methods for its facts and decisions."""

    def __init__(self, sequence: Sequence, state: CoreState) -> None:
        arrival = sequence.arrival
        self.sequence = sequence
        self.policy = state.set_of(sequence).policy_name
        self.num_replicas = len(state.set_of(sequence).replicas)
        self.start_ns = self.cursor_ns = min(arrival.scheduling.received_ns or arrival.ts, arrival.ts)
        self.first_token_ns: int | None = None
        #: Of its latest admission before the current drain.
        self.urgency = sequence.urgency
        self.notes: list[str] = []
        #: Whether an event of it has been read.
        self._is_seen = False
        self._intervals: list[Interval] = []
        self._steps: list[StepShare] = []
        self._preemptions: list[Preemption] = []
        self._phase: Phase = "queue"
        self._wait: _Wait | None = None
        self._flights: deque[_Flight] = deque()
        #: The time of its preemption, if it still has rows in flight.
        self._draining_ns: int | None = None
        self._completed_ns = -1
        self._num_tokens = sequence.num_tokens
        self._watch = WaitWatch()
        #: By (replica, epoch). Steps that completed before its arrival were in no stage that its own wait for.
        self._stage_waits: dict[tuple[int, int], StageWaits] = {}

    def arrive(self) -> None:
        """Its request has been stamped."""
        self._is_seen = True
        arrival = self.sequence.arrival
        if arrival.scheduling.ready_ns:
            self._emit(min(arrival.scheduling.ready_ns, arrival.ts), "edge", "tokenizing")
            self._emit(arrival.ts, "edge", "stamping")
        else:
            self._emit(arrival.ts, "edge", "receiving")

    def resume(self, sequence: Sequence, last_ns: int, now_ns: int, in_flight: list[Launched]) -> None:
        """After a gap of the log from `last_ns` to now. in_flight: launches of all replicas that may lie in it."""
        self.notes.append("events of its life were not recorded" if self._is_seen else "its arrival is not in the log")
        self._is_seen = True
        self._close_wait(last_ns)
        self._emit(now_ns, "unseen", "not_recorded")
        self.sequence = sequence
        self._num_tokens = sequence.num_tokens
        self._flights.clear()
        for launched in in_flight if not sequence.ended else []:
            self.launch(launched, rows_of(launched).get(sequence.id))
        self._watch = WaitWatch()
        self._draining_ns = now_ns if self._flights and not sequence.resident else None
        self._phase = self._find_phase()

    def _find_phase(self) -> Phase:
        """The phase by the state of the sequence."""
        sequence = self.sequence
        if sequence.ended:
            return "text_end"
        if not sequence.resident:
            return "preempted" if sequence.residency else "queue"
        if sequence.state is State.DECODE and not any(flight.is_final for flight in self._flights):
            return "decode"
        return "prefill" if sequence.residency == 1 else "recompute"

    def launch(self, launched: Launched, row: TimelineRow | None) -> None:
        """A step has been launched, with a row of the sequence or without one."""
        if row is not None:
            is_final = row.num_tokens > 0 and row.position + row.num_tokens == self.sequence.prefill_tokens
            residency = self.sequence.residency
            self._close_wait(launched.ts)
            if self._phase in ("queue", "preempted"):
                self._phase = "prefill" if residency == 1 else "recompute"
            self._flights.append(_Flight(launched, row, is_final, residency))
            return
        wait = self._wait
        if wait is not None and wait.reason.cause in _BEHIND_OTHERS and wait.reason.replica == launched.replica:
            for request, index, *_ in launched.chunks:
                identity = SequenceId(request, index)
                if identity not in wait.held_by:
                    wait.admitted[identity] = None

    def complete(self, fact: StepCompleted) -> None:
        """The replica's oldest step has completed, with the sequence or without it."""
        stage_waits_ns: list[int] = []
        if fact.stages:
            stage_waits = self._stage_waits.setdefault((fact.replica, fact.epoch), StageWaits())
            stage_waits_ns = stage_waits.take(fact.stages)
        if not self._flights or self._flights[0].launched.replica != fact.replica:
            return
        self._emit_flight(min(fact.start_ns, fact.ts), "dispatch")
        is_own = self._flights[0].launched.step == fact.step
        if not is_own:
            # Behind another step its own one waits until the first stage is free.
            self._emit_flight(min(fact.freed_ns, fact.ts), "other_step", fact.step)
            return
        self._emit_stages(fact, stage_waits_ns)
        self._emit_flight(min(fact.end_ns, fact.ts), "step", fact.step)
        flight = self._flights.popleft()
        self._completed_ns = fact.ts
        self._steps.append(self._share(flight, fact))
        self._num_tokens = self.sequence.num_tokens
        if self.first_token_ns is None and self.sequence.num_output_tokens:
            self.first_token_ns = fact.ts
        if not self._flights:
            self._emit_flight(fact.ts, "return")
            self._end_draining()
        if flight.is_final and self._phase in ("prefill", "recompute"):
            self._phase = "decode"

    def _share(self, flight: _Flight, fact: StepCompleted) -> StepShare:
        launched = flight.launched
        return StepShare(
            replica=launched.replica,
            step=launched.step,
            launched_ns=launched.ts,
            start_ns=fact.start_ns,
            end_ns=fact.end_ns,
            completed_ns=fact.ts,
            position=flight.row.position,
            num_tokens=flight.row.num_tokens,
            num_produced=self.sequence.num_tokens - self._num_tokens,
            num_decodes=len(launched.decodes) - (not flight.row.num_tokens),
            num_chunk_tokens=sum(chunk[3] for chunk in launched.chunks) - flight.row.num_tokens,
            residency=flight.residency,
        )

    def check_worker(self, state: CoreState, now_ns: int) -> None:
        """If the worker of its steps in flight is lost, they are lost too."""
        if not self._flights:
            return
        launched = self._flights[0].launched
        replica = state.replicas[launched.replica]
        if replica.up and replica.epoch == launched.epoch:
            return
        self._emit_flight(now_ns, "lost_step", *[flight.launched.step for flight in self._flights])
        self._flights.clear()
        self._end_draining()

    def preempt(self, decision: Preempted, order: Order | None) -> None:
        """It lost its blocks; rows of it may be in flight."""
        self._close_wait(decision.ts)
        self._preemptions.append(
            Preemption(
                at_ns=decision.ts,
                replica=decision.replica,
                reason=decision.reason,
                num_tokens=self.sequence.num_tokens,
                by=None if decision.by is None else SequenceId(*decision.by),
                order=order,
            )
        )
        self._draining_ns = decision.ts
        if not self._flights:
            self._end_draining()

    def _end_draining(self) -> None:
        if self._draining_ns is not None:
            self._draining_ns = None
            self._phase = "preempted"

    def close(self, now_ns: int) -> None:
        """It has ended except for its text: rows in flight no longer count."""
        self._stop(now_ns)
        self._phase = "text_end"

    def settle(self, state: CoreState) -> None:
        """After a drain: if the sequence is in no step, note the reason."""
        self.urgency = self.sequence.urgency
        reason = self._watch.look(state, self.sequence)
        if self._flights:
            return
        if self.sequence.resident and self._phase in ("queue", "preempted"):
            self._close_wait(state.now_ns)
            self._phase = "prefill" if self.sequence.residency == 1 else "recompute"
        assert reason is not None, f"{self.sequence} is in a step that the log does not have"
        if self._wait is None or not self._wait.goes_on(reason, self._phase):
            self._close_wait(state.now_ns)
            self._wait = self._open_wait(state, reason)
        self._wait.num_lacking = max(self._wait.num_lacking, reason.num_lacking)
        if reason.cause in ("token_budget", "micro_batch"):
            self._wait.steps[self._watch.plans[reason.replica].step] = None
        if reason.cause in _BEHIND_OTHERS:
            self._note_order(state, self._wait)

    def _open_wait(self, state: CoreState, reason: WaitReason) -> _Wait:
        config = state.set_of(self.sequence).config
        cause = reason.cause
        limits: dict[Cause, int] = {
            "sequence_limit": config.max_residents,
            "blocks": config.blocks_per_replica,
            "token_budget": config.max_num_batched_tokens,
            "steps_in_flight": config.steps_in_flight,
        }
        if cause == "steps_in_flight" and not state.replicas[reason.replica].has_room():
            # Fewer, if the last of them takes long.
            limits[cause] = len(state.replicas[reason.replica].in_flight)
        held_by: list[SequenceId] = []
        if cause in ("sequence_limit", "blocks"):
            held_by = [resident.id for resident in state.replicas[reason.replica].running]
        elif cause == "token_budget":
            chunks = self._watch.plans[reason.replica].chunks
            held_by = [SequenceId(request, index) for request, index, *_ in chunks]
        wait = _Wait(reason, self._phase, limits.get(cause, 0), held_by)
        if cause == "steps_in_flight":
            wait.steps = dict.fromkeys(step.step for step in state.replicas[reason.replica].in_flight)
        return wait

    def _note_order(self, state: CoreState, wait: _Wait) -> None:
        """Note the first sequence ahead; or the first later arrival ahead, which is more surprising."""
        sequence = self.sequence
        head = waiting_head(state, state.replicas[wait.reason.replica]) if sequence.ticket else None
        if head is not None and head.sequence is not sequence:
            if wait.order is None or wait.order.other < sequence.id < head.sequence.id:
                wait.order = order_of(state, head.sequence, head.urgency, urgency_now(state, sequence)) or wait.order
        elif wait.order is None:
            wait.order = self._find_order(state, wait)

    def _find_order(self, state: CoreState, wait: _Wait) -> Order | None:
        """The first of the sequences ahead that has not ended, if it is more urgent."""
        sequence = self.sequence
        for identity in wait.admitted if sequence.ticket else wait.held_by:
            request = state.requests.get(identity.request)
            other = None if request is None else request.sequences[identity.index]
            if other is not None and other is not sequence and not other.ended:
                return order_of(state, other, urgency_now(state, other), urgency_now(state, sequence))
        return None

    def finish(self, decision: Finished) -> Explanation:
        """It has ended."""
        self._stop(decision.ts)
        return self._explanation(decision.reason, decision.position, decision.cached_tokens)

    def cut(self, now_ns: int, outcome: str) -> Explanation:
        """The log has no more of it."""
        self._stop(now_ns)
        return self._explanation(outcome, self.sequence.num_output_tokens, self.sequence.cached_tokens)

    def _stop(self, now_ns: int) -> None:
        self._close_wait(now_ns)
        if self._completed_ns == now_ns:
            self._emit_flight(now_ns, "return")
        else:
            self._emit_flight(now_ns, "cut_step", *[flight.launched.step for flight in self._flights])
        self._flights.clear()

    def _explanation(self, outcome: str, output_tokens: int, cached_tokens: int) -> Explanation:
        arrival = self.sequence.arrival
        return Explanation(
            request=arrival.s,
            index=self.sequence.index,
            n=arrival.n,
            kind=arrival.scheduling.kind,
            policy=self.policy,
            num_replicas=self.num_replicas,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            outcome=outcome,
            start_ns=self.start_ns,
            arrived_ns=arrival.ts,
            deadline_ns=arrival.scheduling.deadline_ns,
            first_token_ns=self.first_token_ns,
            end_ns=self.cursor_ns,
            intervals=self._intervals,
            steps=self._steps,
            preemptions=self._preemptions,
            notes=self.notes,
        )

    def _close_wait(self, now_ns: int) -> None:
        wait, self._wait = self._wait, None
        if wait is None or now_ns <= self.cursor_ns:
            return
        self._intervals.append(
            Interval(
                start_ns=self.cursor_ns,
                end_ns=now_ns,
                phase=wait.phase,
                cause=wait.reason.cause,
                replica=wait.reason.replica,
                steps=list(wait.steps),
                limit=wait.limit,
                num_lacking=wait.num_lacking,
                held_by=list(wait.held_by),
                admitted=list(wait.admitted),
                other=wait.reason.other,
                order=wait.order,
            )
        )
        self.cursor_ns = now_ns

    def _emit_flight(self, end_ns: int, cause: Cause, *steps: int) -> None:
        """Time with rows in flight. After a preemption it waits for them."""
        draining_ns = self._draining_ns
        if draining_ns is None:
            self._emit(end_ns, self._phase, cause, *steps)
            return
        self._emit(min(end_ns, draining_ns), self._phase, cause, *steps)
        self._emit(end_ns, "preempted", "draining", *steps)

    def _emit_stages(self, fact: StepCompleted, waits_ns: list[int]) -> None:
        """A step of a pipeline. waits_ns: how long it waited for each stage that computed another one."""
        there_ns = fact.start_ns
        for (start_ns, end_ns), wait_ns in zip(fact.stages, waits_ns, strict=True):
            self._emit_flight(min(there_ns + wait_ns, fact.ts), "stage_wait", fact.step)
            self._emit_flight(min(start_ns, fact.ts), "exchange", fact.step)
            self._emit_flight(min(end_ns, fact.ts), "step", fact.step)
            there_ns = end_ns

    def _emit(self, end_ns: int, phase: Phase, cause: Cause, *steps: int) -> None:
        if end_ns <= self.cursor_ns:
            return
        replica = self._flights[0].launched.replica if self._flights else self.sequence.replica
        self._intervals.append(
            Interval(
                start_ns=self.cursor_ns,
                end_ns=end_ns,
                phase=phase,
                cause=cause,
                replica=-1 if phase in ("edge", "unseen") else replica,
                steps=list(steps),
            )
        )
        self.cursor_ns = end_ns


def rows_of(launched: Launched) -> dict[tuple[int, int], TimelineRow]:
    """By (request, index)."""
    rows = {(request, index): TimelineRow(position, 0) for request, index, position, _ in launched.decodes}
    for request, index, position, num_tokens, _ in launched.chunks:
        rows[request, index] = TimelineRow(position, num_tokens)
    return rows


def order_of(state: CoreState, other: Sequence, others: Urgency, own: Urgency) -> Order | None:
    """An order if `other` is more urgent, else None."""
    if others >= own:
        return None
    return Order(policy=state.set_of(other).policy_name, other=other.id, other_urgency=others[:2], own_urgency=own[:2])
