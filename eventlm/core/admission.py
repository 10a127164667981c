"""Admission to a replica: whether a waiting sequence fits, and what it takes there."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.core.state.block_pool import Node
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.waiting_queue import Candidate


class Fit(NamedTuple):
    """What a waiting sequence would hit on a replica, and how many blocks it lacks (at most 0: it fits)."""

    hits: list[Node]
    num_lacking: int


def measure(replica: Replica, sequence: Sequence) -> Fit:
    """How a waiting sequence would fit now."""
    block_size = replica.config.block_size
    pool = replica.pool
    hits = replica.find_hits(sequence, block_size)
    num_fresh = sequence.blocks_to_admit(block_size) - len(hits)
    return Fit(hits, num_fresh - (pool.num_available - pool.num_idle_on(hits)))


def admit(state: CoreState, replica: Replica, candidate: Candidate, fit: Fit) -> None:
    """Give a waiting sequence its blocks and slot. Its urgency is kept as it is now."""
    sequence = candidate.sequence
    replicaset = state.set_of(sequence)
    replicaset.queue_of(sequence).remove(sequence)
    replicaset.num_waiting -= 1
    sequence.urgency = candidate.urgency
    sequence.generation = sequence.key_generation if replicaset.policy.static else replicaset.round_generation
    replica.settle(sequence, [block for block, _ in fit.hits], replicaset.config.block_size)
    if sequence.residency == 1:
        sequence.cached_tokens = sequence.launched_tokens
    note_progress(state, sequence)


def note_progress(state: CoreState, sequence: Sequence) -> None:
    """Keep the view of a partial prefill true."""
    view = sequence.view
    view.done_tokens = sequence.launched_tokens
    view.cached_tokens = sequence.cached_tokens
    view.remaining_ns = state.set_of(sequence).prefill_ns(sequence.prefill_tokens, sequence.launched_tokens)
