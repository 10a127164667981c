"""What the timelines of all sequences have in common: intervals without gaps, and why a sequence waits in line.

`cursor_ns` is the end of the last interval. While a sequence waits, the state after a drain gives the cause of the time
until the next event.
"""

from __future__ import annotations

from collections.abc import Iterable

from eventlm.core.scheduler import waiting_head
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence, Urgency
from eventlm.core.state.step_plan import WaitReason
from eventlm.core.wait_reason import WaitWatch, urgency_now
from eventlm.replay.explain.result import (
    AttemptShare,
    Cause,
    Explanation,
    Interval,
    Order,
    Phase,
    Preemption,
    StepShare,
)
from eventlm.types import SequenceId

#: Causes for which an interval names the sequences that were ahead.
BEHIND_OTHERS = ("sequence_limit", "blocks", "token_budget", "head_of_line", "backend_limit")


class OpenWait:
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


class Life:
    """The life of one sequence so far. `settle` is called after every drain, the other methods for its facts and
    decisions.
    """

    def __init__(self, sequence: Sequence, state: CoreState) -> None:
        arrival = sequence.arrival
        self.sequence = sequence
        self.policy = state.set_of(sequence).policy_name
        self.is_forwarded = state.set_of(sequence).forwards is not None
        self.num_replicas = len(state.set_of(sequence).replicas)
        self.start_ns = self.cursor_ns = min(arrival.scheduling.received_ns or arrival.ts, arrival.ts)
        self.first_token_ns: int | None = None
        #: Of its latest admission before the current drain.
        self.urgency = sequence.urgency
        self.notes: list[str] = []
        self.steps: list[StepShare] = []
        self.attempts: list[AttemptShare] = []
        self.preemptions: list[Preemption] = []
        self.phase: Phase = "queue"
        self.wait: OpenWait | None = None
        self.watch = WaitWatch()
        #: Whether an event of it has been read.
        self._is_seen = False
        self._intervals: list[Interval] = []

    def arrive(self) -> None:
        """Its request has been stamped."""
        self._is_seen = True
        arrival = self.sequence.arrival
        if arrival.scheduling.ready_ns:
            self.emit(min(arrival.scheduling.ready_ns, arrival.ts), "edge", "tokenizing")
            self.emit(arrival.ts, "edge", "stamping")
        else:
            self.emit(arrival.ts, "edge", "receiving")

    def note_gap(self, sequence: Sequence, last_ns: int, now_ns: int) -> None:
        """Events from `last_ns` to now are not in the log."""
        self.notes.append("events of its life were not recorded" if self._is_seen else "its arrival is not in the log")
        self._is_seen = True
        self.close_wait(last_ns)
        self.emit(now_ns, "unseen", "not_recorded")
        self.sequence = sequence
        self.watch = WaitWatch()

    def note_outage(self, died_ns: int, now_ns: int) -> None:
        """There was no engine meanwhile."""
        self.close_wait(died_ns)
        self.emit(now_ns, self.phase, "engine_down")

    def go_on_waiting(self, state: CoreState, reason: WaitReason) -> None:
        """After a drain it waits for this reason."""
        if self.wait is None or not self.wait.goes_on(reason, self.phase):
            self.close_wait(state.now_ns)
            self.wait = self._open_wait(state, reason)
        self.wait.num_lacking = max(self.wait.num_lacking, reason.num_lacking)
        if reason.cause in ("token_budget", "micro_batch"):
            self.wait.steps[self.watch.plans[reason.replica].step] = None
        if reason.cause in BEHIND_OTHERS:
            self._note_order(state, self.wait)

    def note_admitted(self, replica: int, identities: Iterable[SequenceId]) -> None:
        """Others have been admitted to a replica. It may have waited behind them."""
        wait = self.wait
        if wait is not None and wait.reason.cause in BEHIND_OTHERS and wait.reason.replica == replica:
            wait.admitted |= {identity: None for identity in identities if identity not in wait.held_by}

    def _open_wait(self, state: CoreState, reason: WaitReason) -> OpenWait:
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
        capacity = state.replicas[reason.replica].capacity
        if cause == "backend_limit" and capacity is not None:
            limits[cause] = capacity.limit
        held_by: list[SequenceId] = []
        if cause in ("sequence_limit", "blocks", "backend_limit"):
            held_by = [resident.id for resident in state.replicas[reason.replica].running]
        elif cause == "token_budget":
            chunks = self.watch.plans[reason.replica].chunks
            held_by = [SequenceId(request, index) for request, index, *_ in chunks]
        wait = OpenWait(reason, self.phase, limits.get(cause, 0), held_by)
        if cause == "steps_in_flight":
            wait.steps = dict.fromkeys(step.step for step in state.replicas[reason.replica].in_flight)
        return wait

    def _note_order(self, state: CoreState, wait: OpenWait) -> None:
        """Note the first sequence ahead; or the first later arrival ahead, which is more surprising."""
        sequence = self.sequence
        head = waiting_head(state, state.replicas[wait.reason.replica]) if sequence.ticket else None
        if head is not None and head.sequence is not sequence:
            if wait.order is None or wait.order.other < sequence.id < head.sequence.id:
                wait.order = order_of(state, head.sequence, head.urgency, urgency_now(state, sequence)) or wait.order
        elif wait.order is None:
            wait.order = self._find_order(state, wait)

    def _find_order(self, state: CoreState, wait: OpenWait) -> Order | None:
        """The first of the sequences ahead that has not ended, if it is more urgent."""
        sequence = self.sequence
        for identity in wait.admitted if sequence.ticket else wait.held_by:
            request = state.requests.get(identity.request)
            other = None if request is None else request.sequences[identity.index]
            if other is not None and other is not sequence and not other.ended:
                return order_of(state, other, urgency_now(state, other), urgency_now(state, sequence))
        return None

    def explanation(self, outcome: str, output_tokens: int, cached_tokens: int) -> Explanation:
        """It has ended, or the log has no more of it."""
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
            steps=self.steps,
            is_forwarded=self.is_forwarded,
            attempts=self.attempts,
            preemptions=self.preemptions,
            notes=self.notes,
        )

    def close_wait(self, now_ns: int) -> None:
        """It does not wait any more."""
        wait, self.wait = self.wait, None
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

    def emit(self, end_ns: int, phase: Phase, cause: Cause, *steps: int, replica: int = -1) -> None:
        """Add the time since the last interval; nothing if that is none."""
        if end_ns <= self.cursor_ns:
            return
        self._intervals.append(
            Interval(
                start_ns=self.cursor_ns, end_ns=end_ns, phase=phase, cause=cause, replica=replica, steps=list(steps)
            )
        )
        self.cursor_ns = end_ns


def order_of(state: CoreState, other: Sequence, others: Urgency, own: Urgency) -> Order | None:
    """An order if `other` is more urgent, else None."""
    if others >= own:
        return None
    return Order(policy=state.set_of(other).policy_name, other=other.id, other_urgency=others[:2], own_urgency=own[:2])
