"""Admission to a replica: whether a waiting sequence fits, and what it takes there."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.core.state.block_pool import Node
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.kv_groups import blocks_by_group, least_held
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.waiting_queue import Candidate


class Fit(NamedTuple):
    """What a waiting sequence would hit on a replica, and how many blocks it lacks (at most 0: it fits).

    first_group: the KV group in which it would begin. lacking: what it lacks in each group; `num_lacking` is the sum
    over those that lack any, or at most 0 if none does.
    """

    hits: list[Node]
    num_lacking: int
    first_group: int
    lacking: list[int]


def measure(replica: Replica, sequence: Sequence, first_group: int = -1) -> Fit:
    """How a waiting sequence would fit now. first_group: where it is to begin if it hits nothing; -1: where there is
    least to read.
    """
    config, pool = replica.config, replica.pool
    hits = replica.find_hits(sequence, config.block_size)
    num_blocks, idle = sequence.blocks_to_admit(config.block_size), pool.idle_on(hits)
    if pool.num_groups == 1:
        num_lacking = num_blocks - len(hits) - (pool.num_available - len(idle))
        return Fit(hits, num_lacking, 0, [num_lacking])
    if hits:
        first_group = pool.group_of(hits[0][0])
    elif first_group < 0:
        first_group = least_held(pool)
    lacking = blocks_by_group(config, first_group, len(hits), num_blocks)
    for group in range(pool.num_groups):
        lacking[group] -= pool.available_in(group)
    for block, _ in idle:
        lacking[pool.group_of(block)] += 1
    return Fit(hits, sum(max(number, 0) for number in lacking), first_group, lacking)


def admit(state: CoreState, replica: Replica, candidate: Candidate, fit: Fit) -> None:
    """Give a waiting sequence its blocks and slot. Its urgency is kept as it is now."""
    sequence = candidate.sequence
    replicaset = state.set_of(sequence)
    replicaset.leave_line(sequence)
    replicaset.num_waiting -= 1
    sequence.urgency = candidate.urgency
    sequence.generation = sequence.key_generation if replicaset.policy.static else replicaset.round_generation
    num_lacking = 0 if replica.capacity is None else max(fit.num_lacking, 0)
    replica.settle(sequence, [block for block, _ in fit.hits], fit.first_group, num_lacking)
    if sequence.residency == 1:
        sequence.cached_tokens = sequence.launched_tokens
    note_progress(state, sequence)


def note_progress(state: CoreState, sequence: Sequence) -> None:
    """Keep the view of a partial prefill true."""
    view = sequence.view
    view.done_tokens = sequence.launched_tokens
    view.cached_tokens = sequence.cached_tokens
    view.remaining_ns = state.set_of(sequence).prefill_ns(sequence.prefill_tokens, sequence.launched_tokens)
