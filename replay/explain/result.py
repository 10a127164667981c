"""Explanations: gapless intervals with one cause each, the steps of a sequence, its preemptions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from eventlm.core.state.step_plan import WaitCause
from eventlm.telemetry.phases import PhaseName
from eventlm.types import RequestKind, SequenceId

#: The phase of a sequence that an interval belongs to. Unseen: while nothing was recorded, or before the log begins.
#: One that another server has is in `prefill` until the first tokens come, whichever attempt brings them.
Phase = Literal[PhaseName, "unseen"]

#: Causes other than waiting: what happened to the sequence.
Doing = Literal[
    "receiving",  # from the socket to the stamp, if the time of tokenizing is unknown
    "tokenizing",  # from the socket to the tokenized prompt
    "stamping",  # from there to the stamp
    "step",  # the worker, of a pipeline one of its stages, computed a step with it
    "stage_wait",  # its step waited for a stage that computed another one
    "exchange",  # its step was on the way from stage to stage
    "other_step",  # its step was launched, and the worker computed an earlier one without it
    "dispatch",  # its step was launched, and the worker had not begun it
    "return",  # its step was computed, and the engine had not taken in the result
    "lost_step",  # in a step whose worker was lost
    "engine_down",  # the engine had died, and no other one had gone on yet
    "cut_step",  # in a step that was still under way when it ended, or the log did
    "first_token",  # another server has it, and has not answered: the network, its queue and its prefill
    "streaming",  # another server goes on with its answer
    "failed_attempt",  # at another server, from where nothing more came before the attempt failed
    "outrun",  # at another server, before the second attempt that was the first to answer
    "cut_attempt",  # at another server that had not answered when it ended, or the log did
    "not_recorded",
]
Cause = WaitCause | Doing

#: What a step of it goes through, from its start to its end.
IN_STEP: tuple[Cause, ...] = ("step", "stage_wait", "exchange")


class Order(Struct, frozen=True, kw_only=True):
    """Another sequence was more urgent: (priority, key) of both under a policy; smaller goes first."""

    policy: str
    other: SequenceId
    other_urgency: tuple[int, int]
    own_urgency: tuple[int, int]


class Interval(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From `start_ns` until `end_ns`, one cause applies.

    steps: those that computed it, or that were full, or in flight, without it.
    limit: the limit that was reached: sequences, tokens of a step, steps in flight, blocks of the pool, requests at
    another server. num_lacking: the most blocks that it lacked.
    held_by: the residents at the beginning; of a full step, its prompts. admitted: those admitted later, or in later
    full steps. other: the sequence that does not fit and is not passed over, or is tried alone.
    order: a sequence that was ahead, preferably a later arrival.
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
    """A completed step with the sequence in it. `start_ns` and `end_ns` are the worker's own times.

    num_tokens: of its prompt chunk after `position`, or 0 for a decode. num_produced: tokens that it got.
    num_decodes, num_chunk_tokens: of the other sequences in the step.
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
    #: The sequence's admission to a replica, counted from 1.
    residency: int


class AttemptShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt to have another server answer the sequence. Its replica and its address, empty if that is not known.

    running, limit: requests that the server had with it, and might have, when it was sent. first_ns: its first tokens
    came; None: none did. num_tokens: that it brought. end: `answered`, a kind of failure, `withdrawn` (another one
    answered first), `cut` (the sequence ended, or the log). status: of HTTP; retry_after_ns: what the server asked for.
    retry_ns: when it was to be sent again at the earliest; None: it was not to be.
    """

    number: int
    replica: int
    backend: str = ""
    sent_ns: int
    ended_ns: int
    first_ns: int | None = None
    is_hedge: bool = False
    cached_tokens: int = 0
    running: int = 0
    limit: int = 0
    num_tokens: int = 0
    end: str
    status: int = 0
    retry_after_ns: int = 0
    retry_ns: int | None = None


class Preemption(Struct, frozen=True, kw_only=True):
    """The sequence lost its blocks. num_tokens: prompt and kept output, to be computed again or found in the cache."""

    at_ns: int
    replica: int
    reason: str
    num_tokens: int
    by: SequenceId | None = None
    order: Order | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """One sequence, from the reception of its request to its end, or to the end of the log.

    outcome: the finish reason, `rejected: ...`, `unfinished` (the log ends first) or `unknown` (it ended unrecorded).
    policy: in force at its arrival, or at the beginning of the log. n: samples of the request.
    num_replicas: of the run; steps count on each. deadline_ns: for the first token, from the arrival; 0: none.
    is_forwarded: it is for replicas that are other servers.
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
    is_forwarded: bool = False
    #: At other servers, in the order of their ends.
    attempts: list[AttemptShare] = []
    preemptions: list[Preemption] = []
    notes: list[str] = []

    @property
    def total_ns(self) -> int:
        """The sum of the intervals."""
        return self.end_ns - self.start_ns

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.request}.{self.index}" if self.n > 1 else str(self.request)


class Part(Struct, frozen=True, kw_only=True):
    """The total time of one cause in one phase."""

    phase: Phase
    cause: Cause
    duration_ns: int


def parts(explanation: Explanation, *, from_ns: int | None = None, until_ns: int | None = None) -> list[Part]:
    """The time of each cause in each phase, longest first; in total, or between two times."""
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
