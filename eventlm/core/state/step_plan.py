"""The step that the scheduler forms for a replica, row by row, and why it leaves other sequences out."""

from __future__ import annotations

from typing import Literal, NamedTuple

from eventlm.core.plugin import StepLoad
from eventlm.core.predictor import PICOSECONDS_PER_NANOSECOND, Predictor
from eventlm.core.state.replica import ChunkRow
from eventlm.core.state.sequence import Sequence
from eventlm.types import SequenceId

#: From the one nearest to running to the one farthest from it, as far as several replicas could take the sequence.
WaitCause = Literal[
    "steps_in_flight",  # no step has been planned since it could run: the pipeline is full, or has one that takes long
    "batcher",  # the batcher gave its prefill no chunk
    "token_budget",  # the step was full with more urgent rows
    "micro_batch",  # the step has its share of a pipeline's decodes, or max_num_seqs rows, all more urgent
    "head_of_line",  # a more urgent one does not fit and may not be passed over
    "trial",  # a suspect is tried alone (see `eventlm.core.poison_requests`)
    "blocks",  # the pool has too few for it
    "sequence_limit",  # as many sequences are resident as may be
    "avoided",  # of the other servers, the one with room is where it has just failed
    "backend_limit",  # the other server has as many requests as it may
    "worker",  # no worker is up
    "backend",  # no other server is up
    "backoff",  # its latest attempt at another server has failed, and the next one is not due
    "paused",
    "draining",  # preempted, and rows of it are still in flight
    "grammar",  # its matcher is not built
    "text_end",  # the edge has yet to look at its text
]


class WaitReason(NamedTuple):
    """Why a sequence is in no step. `replica` is the one that could take it first, -1 where none could.

    num_lacking: blocks that it lacks. other: the more urgent one that does not fit, or the suspect that is tried.
    """

    cause: WaitCause
    replica: int = -1
    num_lacking: int = 0
    other: SequenceId | None = None


class StepPlan:
    """The rows of a step in the shape of its launch event, and the reasons of those that got none.

    step: its number once it is launched; -1 if there was nothing to run. left_out: sequences that were looked at.
    rest: why the line was not followed to its end, None if it was. group_loads: what each KV group computes of the
    step, where there are several; `load` counts every row once.
    """

    __slots__ = (
        "blocks",
        "chunk_rows",
        "chunks",
        "decodes",
        "decoding",
        "group_loads",
        "left_out",
        "load",
        "most",
        "replica",
        "rest",
        "states",
        "step",
    )

    def __init__(self, replica: int, now_ns: int, budget_tokens: int, num_groups: int = 1) -> None:
        self.replica = replica
        self.step = -1
        self.load = StepLoad(now_ns=now_ns, budget_tokens=budget_tokens)
        self.group_loads: list[StepLoad] = []
        if num_groups > 1:
            self.group_loads = [StepLoad(now_ns=now_ns, budget_tokens=budget_tokens) for _ in range(num_groups)]
        self.decoding: list[Sequence] = []
        self.decodes: list[tuple[int, int, int, int]] = []
        self.chunk_rows: list[ChunkRow] = []
        self.chunks: list[tuple[int, int, int, int, int]] = []
        self.most: list[int] = []
        self.blocks: list[tuple[int, int, list[int]]] = []
        self.states: list[tuple[int, int, int, list[tuple[int, int]]]] = []
        self.left_out: dict[SequenceId, WaitReason] = {}
        self.rest: WaitReason | None = None

    @property
    def is_full(self) -> bool:
        """Whether no group may have another token."""
        if not self.group_loads:
            return self.load.num_tokens >= self.load.budget_tokens
        return all(load.num_tokens >= load.budget_tokens for load in self.group_loads)

    def predicted_ns(self, predictor: Predictor) -> int:
        """Predicted duration of the step: that of the group which takes longest."""
        longest_ps = max(map(predictor.step_ps, self.group_loads)) if self.group_loads else predictor.step_ps(self.load)
        return longest_ps // PICOSECONDS_PER_NANOSECOND

    def leave_out(
        self, sequence: Sequence, cause: WaitCause, *, num_lacking: int = 0, other: SequenceId | None = None
    ) -> None:
        """Note why a sequence gets no row."""
        self.left_out[sequence.id] = WaitReason(cause, self.replica, num_lacking, other)

    def stop(self, cause: WaitCause, other: Sequence | None = None) -> None:
        """Note why no further sequence is looked at."""
        self.rest = WaitReason(cause, self.replica, other=None if other is None else other.id)

    def wait_reason(self, sequence: Sequence) -> WaitReason | None:
        """Why a sequence that could have run has no row; None if it was not there to be looked at."""
        if self.rest is not None and self.rest.cause == "trial":
            return self.rest
        # All residents are looked at.
        return self.left_out.get(sequence.id, self.rest if sequence.ticket else None)
