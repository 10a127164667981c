"""The timeline of one sequence on a worker, split at the events of the log so that every nanosecond has one cause.

`cursor_ns` is the end of the last interval. After a drain, a sequence either waits or has rows in flight. If it waits,
the state gives the cause of the time until the next event. If it has rows in flight, the completions will show it: the
worker's start and end of each step, and of each stage of a pipeline, split the time since the cursor.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence, State
from eventlm.events import Finished, Launched, Preempted, Recovered, StepCompleted
from eventlm.metrics.live import StageWaits
from eventlm.replay.explain.life import Life
from eventlm.replay.explain.result import Cause, Explanation, Order, Phase, Preemption, StepShare
from eventlm.types import SequenceId


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


class Timeline(Life):
    """`settle` is called after every drain, the other methods for its facts and decisions."""

    def __init__(self, sequence: Sequence, state: CoreState) -> None:
        super().__init__(sequence, state)
        self._flights: deque[_Flight] = deque()
        #: The time of its preemption, if it still has rows in flight.
        self._draining_ns: int | None = None
        self._completed_ns = -1
        self._num_tokens = sequence.num_tokens
        #: By (replica, epoch). Steps that completed before its arrival were in no stage that its own wait for.
        self._stage_waits: dict[tuple[int, int], StageWaits] = {}

    def resume(self, sequence: Sequence, last_ns: int, now_ns: int, in_flight: list[Launched]) -> None:
        """After a gap of the log from `last_ns` to now. in_flight: launches of all replicas that may lie in it."""
        self.note_gap(sequence, last_ns, now_ns)
        self._num_tokens = sequence.num_tokens
        self._flights.clear()
        for launched in in_flight if not sequence.ended else []:
            self.launch(launched, rows_of(launched).get(sequence.id))
        self._draining_ns = now_ns if self._flights and not sequence.resident else None
        self.phase = self._find_phase()

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
            self.close_wait(launched.ts)
            if self.phase in ("queue", "preempted"):
                self.phase = "prefill" if residency == 1 else "recompute"
            self._flights.append(_Flight(launched, row, is_final, residency))
            return
        self.note_admitted(launched.replica, (SequenceId(request, index) for request, index, *_ in launched.chunks))

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
        self.steps.append(self._share(flight, fact))
        self._num_tokens = self.sequence.num_tokens
        if self.first_token_ns is None and self.sequence.num_output_tokens:
            self.first_token_ns = fact.ts
        if not self._flights:
            self._emit_flight(fact.ts, "return")
            self._end_draining()
        if flight.is_final and self.phase in ("prefill", "recompute"):
            self.phase = "decode"

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

    def outlive(self, fact: Recovered) -> None:
        """The engine died and another one goes on."""
        died_ns = fact.ts - fact.down_ns
        if self._flights:
            self._lose_flights(died_ns)
        self.note_outage(died_ns, fact.ts)

    def _lose_flights(self, now_ns: int) -> None:
        self._emit_flight(now_ns, "lost_step", *[flight.launched.step for flight in self._flights])
        self._flights.clear()
        self._end_draining()

    def check_worker(self, state: CoreState, now_ns: int) -> None:
        """If the worker of its steps in flight is lost, they are lost too."""
        if not self._flights:
            return
        launched = self._flights[0].launched
        replica = state.replicas[launched.replica]
        if replica.up and replica.epoch == launched.epoch:
            return
        self._lose_flights(now_ns)

    def preempt(self, decision: Preempted, order: Order | None) -> None:
        """It lost its blocks; rows of it may be in flight."""
        self.close_wait(decision.ts)
        self.preemptions.append(
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
            self.phase = "preempted"

    def close(self, now_ns: int) -> None:
        """It has ended except for its text: rows in flight no longer count."""
        self._stop(now_ns)
        self.phase = "text_end"

    def settle(self, state: CoreState) -> None:
        """After a drain: if the sequence is in no step, note the reason."""
        self.urgency = self.sequence.urgency
        reason = self.watch.look(state, self.sequence)
        if self._flights:
            return
        if self.sequence.resident and self.phase in ("queue", "preempted"):
            self.close_wait(state.now_ns)
            self.phase = "prefill" if self.sequence.residency == 1 else "recompute"
        assert reason is not None, f"{self.sequence} is in a step that the log does not have"
        self.go_on_waiting(state, reason)

    def finish(self, decision: Finished) -> Explanation:
        """It has ended."""
        self._stop(decision.ts)
        return self.explanation(decision.reason, decision.position, decision.cached_tokens)

    def cut(self, now_ns: int, outcome: str) -> Explanation:
        """The log has no more of it."""
        self._stop(now_ns)
        return self.explanation(outcome, self.sequence.num_output_tokens, self.sequence.cached_tokens)

    def _stop(self, now_ns: int) -> None:
        self.close_wait(now_ns)
        if self._completed_ns == now_ns:
            self._emit_flight(now_ns, "return")
        else:
            self._emit_flight(now_ns, "cut_step", *[flight.launched.step for flight in self._flights])
        self._flights.clear()

    def _emit_flight(self, end_ns: int, cause: Cause, *steps: int) -> None:
        """Time with rows in flight. After a preemption it waits for them."""
        draining_ns = self._draining_ns
        if draining_ns is None:
            self._emit_own(end_ns, self.phase, cause, *steps)
            return
        self._emit_own(min(end_ns, draining_ns), self.phase, cause, *steps)
        self._emit_own(end_ns, "preempted", "draining", *steps)

    def _emit_stages(self, fact: StepCompleted, waits_ns: list[int]) -> None:
        """A step of a pipeline. waits_ns: how long it waited for each stage that computed another one."""
        there_ns = fact.start_ns
        for (start_ns, end_ns), wait_ns in zip(fact.stages, waits_ns, strict=True):
            self._emit_flight(min(there_ns + wait_ns, fact.ts), "stage_wait", fact.step)
            self._emit_flight(min(start_ns, fact.ts), "exchange", fact.step)
            self._emit_flight(min(end_ns, fact.ts), "step", fact.step)
            there_ns = end_ns

    def _emit_own(self, end_ns: int, phase: Phase, cause: Cause, *steps: int) -> None:
        replica = self._flights[0].launched.replica if self._flights else self.sequence.replica
        self.emit(end_ns, phase, cause, *steps, replica=replica)


def rows_of(launched: Launched) -> dict[tuple[int, int], TimelineRow]:
    """By (request, index)."""
    rows = {(request, index): TimelineRow(position, 0) for request, index, position, _ in launched.decodes}
    for request, index, position, num_tokens, _ in launched.chunks:
        rows[request, index] = TimelineRow(position, num_tokens)
    return rows
