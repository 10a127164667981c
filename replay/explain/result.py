"""What an explanation says: gapless intervals with one cause each, the steps of a sequence, its preemptions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from eventlm.core import wait_reason
from eventlm.types import RequestKind, SequenceId

#: The part of a sequence's life that an interval belongs to.
Phase = Literal[
    "edge",  # before the engine stamped its arrival
    "queue",  # waits for its first admission
    "prefill",  # resident, until its last prompt chunk has completed
    "decode",
    "preempted",  # waits to be admitted again
    "recompute",  # resident again, until what it had is computed again
    "text_end",  # its end was seen, the edge has yet to look at its text
    "unseen",  # lived while nothing was recorded, or before the log begins
]

#: In whose absence nobody waits: what the sequence was doing.
Doing = Literal[
    "receiving",  # from the socket to the stamp, where it is not known when the prompt was tokenized
    "tokenizing",  # from the socket to the tokenized prompt
    "stamping",  # from there to the stamp
    "step",  # the worker computed a step with it
    "other_step",  # its step was launched, and the worker computed an earlier one without it
    "dispatch",  # its step was launched, and the worker had not begun it
    "return",  # its step was computed, and the engine had not taken in the result
    "lost_step",  # in a step whose worker was lost
    "cut_step",  # in a step that was still under way when it ended, or the log did
    "not_recorded",
]
Cause = wait_reason.Cause | Doing


class Order(Struct, frozen=True, kw_only=True):
    """That somebody was more urgent: (priority, key) of both under a policy, smaller goes first."""

    policy: str
    other: SequenceId
    other_urgency: tuple[int, int]
    own_urgency: tuple[int, int]


class Interval(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From `start_ns` to before `end_ns` one cause held.

    replica: where. steps: those that computed it, or that were full, or in flight, without it.
    limit: what was reached: sequences, tokens of a step, steps in flight, blocks of the pool. num_lacking: most blocks
    that it lacked meanwhile.
    held_by: who was resident there when it began, of a full step whose prompts were in it. admitted: who was admitted
    meanwhile (or in full steps that followed). other: who does not fit and is not passed over, or is tried alone.
    order: one that was ahead of it, a later arrival if there was one, against the sequence itself.
    """

    start_ns: int
    end_ns: int
    phase: Phase
    cause: Cause
    replica: int = -1
    steps: list[int] = []
    limit: int = 0
    num_lacking: int = 0
    held_by: list[SequenceId] = []
    admitted: list[SequenceId] = []
    other: SequenceId | None = None
    order: Order | None = None

    @property
    def duration_ns(self) -> int:
        """Never 0."""
        return self.end_ns - self.start_ns


class StepShare(Struct, frozen=True, kw_only=True):
    """A completed step with the sequence in it. Times on the run's axis; the worker's own `start_ns` and `end_ns`.

    num_tokens: of its prompt chunk behind `position`, or 0 for a decode. num_produced: tokens it got by it.
    num_decodes, num_chunk_tokens: of all others in the step.
    """

    replica: int
    step: int
    launched_ns: int
    start_ns: int
    end_ns: int
    completed_ns: int
    position: int
    num_tokens: int
    num_produced: int
    num_decodes: int
    num_chunk_tokens: int
    #: Counts the sequence's admissions to a replica, from 1.
    residency: int


class Preemption(Struct, frozen=True, kw_only=True):
    """The sequence lost its blocks. `num_tokens`: prompt and kept output, to be computed again or hit."""

    at_ns: int
    replica: int
    reason: str
    num_tokens: int
    by: SequenceId | None = None
    order: Order | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """One sequence, from the reception of its request to its end, or as far as the log goes.

    outcome: the finish reason, `rejected: ...`, `unfinished` (the log ends first) or `unknown` (it ended unrecorded).
    policy: in force when it arrived, or where the log begins. n: samples of the request.
    num_replicas: of the run; steps are counted on each. deadline_ns: for its first token, from its arrival; 0: none.
    """

    request: int
    index: int
    n: int
    kind: RequestKind
    policy: str
    num_replicas: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    outcome: str
    start_ns: int
    arrived_ns: int
    deadline_ns: int
    first_token_ns: int | None
    end_ns: int
    intervals: list[Interval]
    steps: list[StepShare] = []
    preemptions: list[Preemption] = []
    notes: list[str] = []

    @property
    def total_ns(self) -> int:
        """What the intervals add up to."""
        return self.end_ns - self.start_ns

    @property
    def name(self) -> str:
        """As a user would ask for it."""
        return f"{self.request}.{self.index}" if self.n > 1 else str(self.request)


class Part(Struct, frozen=True, kw_only=True):
    """All that one cause took in one phase."""

    phase: Phase
    cause: Cause
    duration_ns: int


def parts(explanation: Explanation, *, from_ns: int | None = None, until_ns: int | None = None) -> list[Part]:
    """What each cause took in each phase, the longest first; of all, or between two times."""
    low = explanation.start_ns if from_ns is None else from_ns
    high = explanation.end_ns if until_ns is None else until_ns
    sums: dict[tuple[Phase, Cause], int] = {}
    for interval in explanation.intervals:
        duration_ns = min(interval.end_ns, high) - max(interval.start_ns, low)
        if duration_ns > 0:
            key = (interval.phase, interval.cause)
            sums[key] = sums.get(key, 0) + duration_ns
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return [Part(phase=phase, cause=cause, duration_ns=duration_ns) for (phase, cause), duration_ns in ordered]
