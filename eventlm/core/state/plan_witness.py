"""What a plan looked at, as entries of a list that the scheduler appends to while it plans.

`CoreState.witness` is that list, or None, which is the rule: then nothing is noted. The same steps are planned either
way. All entries name their replica; those of one step stand between its `TurnTaken` and its `PlanEnded`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from eventlm.core.state.sequence import Urgency
from eventlm.core.state.step_plan import WaitReason
from eventlm.types import SequenceId

#: What became of a sequence that a plan looked at for a prompt chunk.
CandidateVerdict = Literal[
    "partial",  # resident with a half-done prompt: its next chunk was asked for
    "admitted",
    "blocks",  # passed over, because the pool has too few for it
    "token_budget",  # passed over, because a KV group that would compute it has more urgent rows
    "trial",  # passed over, because it is only computed alone
]
#: What became of a decode that lacks blocks.
DecodeVerdict = Literal[
    "fewer_tokens",  # it gets a row that fits into the blocks it has
    "rows_in_flight",  # it gets none: those in flight may need less than was reserved
    "block_taken",  # it gets one block, which was free or which a less urgent resident gave up
    "preempted",  # it lost its own blocks
]
#: Why a resident was made to give way, or why not.
VictimVerdict = Literal[
    "chosen",
    "more_urgent",  # not less urgent than the other by as much as the policy wants
    "exempt",  # evicted `max_evictions` times since its last token
    "shared",  # others hold all of its blocks too
    "spared",  # partial prefills and less urgent decodes go first
]


class TurnTaken(NamedTuple):
    """A replica's turn begins. Replicas with fewer `admitted_tokens` have theirs earlier.

    num_running: residents. num_available: blocks that are free or cached and held by none.
    """

    replica: int
    admitted_tokens: int
    num_in_flight: int
    num_running: int
    num_available: int


class VictimSeen(NamedTuple):
    """A resident looked at for an eviction for the head of the queue, or for a block that a decode needs."""

    replica: int
    sequence: SequenceId
    reason: Literal["admission", "memory"]
    needed_by: SequenceId
    verdict: VictimVerdict


class EvictionWeighed(NamedTuple):
    """The head of the queue may evict, and lacks blocks or a slot. The chosen victims go if they are enough."""

    replica: int
    head: SequenceId
    num_lacking: int
    needs_slot: bool
    is_enough: bool


class DecodeShort(NamedTuple):
    """A decode wants `num_blocks` for its row, and the pool has only `num_available`."""

    replica: int
    sequence: SequenceId
    num_blocks: int
    num_available: int
    verdict: DecodeVerdict


class CandidateSeen(NamedTuple):
    """A sequence that was the most urgent one left. Of one that waits: cached blocks that it would hit, blocks that it
    lacks (at most 0: it fits), and how often less urgent ones had been admitted before it.
    """

    replica: int
    sequence: SequenceId
    urgency: Urgency
    verdict: CandidateVerdict
    num_hits: int = 0
    num_lacking: int = 0
    skips: int = 0


class ChunkAsked(NamedTuple):
    """The batcher was asked for a chunk of at most `max_tokens` after `start`, and gave `num_tokens`."""

    replica: int
    sequence: SequenceId
    start: int
    max_tokens: int
    num_tokens: int


class PlanEnded(NamedTuple):
    """The step is formed. step: -1 if there was nothing to run. rest: why the line was not followed to its end."""

    replica: int
    step: int
    num_decodes: int
    num_chunks: int
    decode_tokens: int
    num_tokens: int
    budget_tokens: int
    rest: WaitReason | None


PlanEntry = TurnTaken | VictimSeen | EvictionWeighed | DecodeShort | CandidateSeen | ChunkAsked | PlanEnded
