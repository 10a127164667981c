"""A sequence, its states and the table of legal transitions.

    WAITING_FOR_GRAMMAR ──► WAITING ──admitted──► PREFILL ──last chunk launched──► DECODE
                               ▲ ◄───preempted─────┘                                 │
                               └───────────────────preempted─────────────────────────┘

When worker or core sees a sequence's end it goes to CLOSING if the edge looks for ends in its text, else to FINISHED.
A preempted sequence waits, and is in no queue until its steps in flight have completed; it may also end by them.
"""

from __future__ import annotations

from enum import IntEnum

from eventlm.core.plugin import SequenceView
from eventlm.core.state.block_pool import Node
from eventlm.errors import InvariantError
from eventlm.events import Arrived
from eventlm.types import FinishReason, SequenceId, ceil_div

#: (priority, key, arrival seq, index): a total order, smaller is more urgent.
Urgency = tuple[int, int, int, int]


class State(IntEnum):
    """Where a sequence is. The first four are alive: they take tokens."""

    WAITING_FOR_GRAMMAR = 0
    WAITING = 1
    PREFILL = 2
    DECODE = 3
    CLOSING = 4
    FINISHED = 5


TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.WAITING_FOR_GRAMMAR, State.WAITING),  # its matcher is built
        (State.WAITING_FOR_GRAMMAR, State.FINISHED),  # its matcher failed, cancel, deadline, front end lost
        (State.WAITING, State.PREFILL),  # admitted to a replica
        (State.WAITING, State.CLOSING),  # ended by a row that was in flight when it was preempted
        (State.WAITING, State.FINISHED),  # the same, or cancel, deadline, text end, front end lost
        (State.PREFILL, State.DECODE),  # the last chunk is launched
        (State.PREFILL, State.WAITING),  # preempted, evicted, or its worker was lost
        (State.PREFILL, State.FINISHED),  # cancel, deadline, text end, front end lost
        (State.DECODE, State.WAITING),  # preempted, evicted, or its worker was lost
        (State.DECODE, State.CLOSING),  # an end was seen, and the edge has yet to look at the text
        (State.DECODE, State.FINISHED),  # an end was seen, or cancel, deadline, text end, front end lost
        (State.CLOSING, State.FINISHED),  # the edge has looked, or cancel, front end lost
    }
)


class IllegalTransitionError(InvariantError):
    """A sequence was asked to go where its state does not lead."""


class Sequence:
    """One sample of a request. Lengths in tokens, `block_table` and `block_names` in blocks.

    num_tokens: prompt and confirmed output. prefill_tokens: what the current prefill computes. launched_tokens: how
    much of that has been launched or hit. max_total_tokens: prompt and max_tokens. pending_tokens: most tokens that
    rows in flight may still produce. room_tokens: how many it may have on the blocks of its table. shipped_blocks:
    leading blocks of the table that its worker has as they are. block_names: integers of the leading full blocks.
    num_tree_blocks: leading blocks of the table that the tree holds too. residency: counts admissions to a replica.
    paths: by replica, what it could hit there while it waits, as last looked up; see `Replica.find_hits`.
    """

    __slots__ = (
        "arrival",
        "block_names",
        "block_table",
        "cached_tokens",
        "closing_reason",
        "contribution",
        "evictions",
        "generation",
        "home",
        "id",
        "in_flight",
        "index",
        "key",
        "key_generation",
        "launched_tokens",
        "max_total_tokens",
        "num_tickets",
        "num_tokens",
        "num_tree_blocks",
        "paths",
        "pending_tokens",
        "prefill_tokens",
        "prompt_tokens",
        "replica",
        "replicaset",
        "request",
        "residency",
        "room_tokens",
        "sampling_in_flight",
        "shipped_blocks",
        "skips",
        "state",
        "ticket",
        "urgency",
        "view",
    )

    def __init__(self, arrival: Arrived, index: int, view: SequenceView) -> None:
        self.arrival = arrival
        self.request = arrival.s
        self.replicaset = arrival.replicaset
        self.index = index
        self.id = SequenceId(arrival.s, index)
        self.view = view
        self.state = State.WAITING_FOR_GRAMMAR if arrival.scheduling.waits_for_grammar else State.WAITING
        self.prompt_tokens = arrival.prompt_tokens
        self.num_tokens = arrival.prompt_tokens
        self.max_total_tokens = arrival.prompt_tokens + arrival.max_tokens
        self.prefill_tokens = arrival.prompt_tokens
        self.launched_tokens = 0
        self.pending_tokens = 0
        self.in_flight = 0
        self.sampling_in_flight = 0
        self.block_names = list(arrival.blocks)
        self.block_table: list[int] = []
        self.room_tokens = 0
        self.num_tree_blocks = 0
        self.shipped_blocks = 0
        self.paths: dict[int, list[Node]] = {}
        self.residency = 0
        #: The replica of its last residency; -1 before any and after its worker was lost.
        self.replica = -1
        #: The replica whose queue it waits in; -1: any replica may take it.
        self.home = -1
        self.urgency: Urgency = (arrival.scheduling.priority, 0, arrival.s, index)
        #: Of the policy whose key its urgency holds.
        self.generation = 0
        #: Its key under a static policy, asked for once; void where the generation is not the present one's.
        self.key = 0
        self.key_generation = -1
        self.evictions = 0
        self.skips = 0
        self.cached_tokens = 0
        self.closing_reason: FinishReason | None = None
        #: Validity of its entry in a waiting queue; 0 where it is in none.
        self.ticket = 0
        self.num_tickets = 0
        #: Its share of the digest, as last computed.
        self.contribution = 0

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output."""
        return self.num_tokens - self.prompt_tokens

    @property
    def ended(self) -> bool:
        """Whether its end was seen: it takes no more tokens."""
        return self.state >= State.CLOSING

    @property
    def resident(self) -> bool:
        """Whether it holds blocks and a slot on a replica."""
        return self.state is State.PREFILL or self.state is State.DECODE

    def transition(self, state: State) -> None:
        """Go to `state`. Raises IllegalTransitionError if the table has no such step."""
        if (self.state, state) not in TRANSITIONS:
            raise IllegalTransitionError(
                f"sequence {self.request}.{self.index} cannot go from {self.state.name} to {state.name}"
            )
        self.state = state

    def note_room(self, block_size: int) -> None:
        """Its block table has changed. The KV of the last token is not stored before the next step."""
        self.room_tokens = min(len(self.block_table) * block_size + 1, self.max_total_tokens)

    def max_hit_blocks(self, block_size: int) -> int:
        """Leading blocks that may be hit: whole ones with a name, ending before the last token to compute."""
        return min((self.num_tokens - 1) // block_size, len(self.block_names))

    def blocks_to_admit(self, block_size: int) -> int:
        """Blocks it reserves at admission: all of prompt and kept output plus one, never beyond its limit."""
        return min(ceil_div(self.num_tokens, block_size) + 1, ceil_div(self.max_total_tokens, block_size))

    def __repr__(self) -> str:
        return (
            f"<{self.request}.{self.index} {self.state.name} {self.num_tokens}/{self.max_total_tokens} tokens, "
            f"launched {self.launched_tokens}/{self.prefill_tokens}, {len(self.block_table)} blocks, "
            f"{self.in_flight} in flight>"
        )


class AdmittedRequest:
    """An admitted request: its arrival and its sequences, by index."""

    __slots__ = ("arrival", "has_timer", "num_unfinished", "sequences")

    def __init__(self, arrival: Arrived, sequences: list[Sequence]) -> None:
        self.arrival = arrival
        self.sequences = sequences
        self.num_unfinished = len(sequences)
        self.has_timer = False
