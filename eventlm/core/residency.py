"""Who gets onto a replica and who has to go: admission, preemption, eviction.

Evictions at admission are all or nothing and bounded by `max_evictions` between two tokens; a memory preemption
always gives the one who asked at least one block, for each resident has a block that it shares with nobody.
"""

from __future__ import annotations

from typing import NamedTuple

from eventlm.core.replica import Replica
from eventlm.core.sequence import Sequence, State, Urgency
from eventlm.core.sequence_manager import enqueue
from eventlm.core.state import CoreState
from eventlm.core.waiting_queue import Candidate
from eventlm.events import Preempted
from eventlm.events.decisions import PreemptReason


class Fit(NamedTuple):
    """What a waiting sequence would hit on a replica, and how many blocks it lacks (at most 0: it fits)."""

    hits: list[int]
    num_lacking: int


def measure(state: CoreState, replica: Replica, sequence: Sequence) -> Fit:
    """How a waiting sequence would fit now."""
    block_size = state.config.block_size
    pool = replica.pool
    hits: list[int] = []
    if not sequence.arrival.skip_cache_read:
        hits = pool.lookup(sequence.names, sequence.max_hit_blocks(block_size))
    num_fresh = sequence.blocks_to_admit(block_size) - len(hits)
    return Fit(hits, num_fresh - (pool.num_available - pool.num_idle_among(hits)))


def admit(state: CoreState, replica: Replica, candidate: Candidate, fit: Fit) -> None:
    """Give a waiting sequence its blocks and slot. Its urgency is kept as it is now."""
    sequence = candidate.sequence
    queue = state.shared_queue if sequence.home < 0 else replica.queue
    queue.remove(sequence)
    state.num_waiting -= 1
    sequence.urgency = candidate.urgency
    replica.settle(sequence, fit.hits, state.config.block_size)
    if sequence.residency == 1:
        sequence.cached_tokens = sequence.launched
    note_progress(state, sequence)


def note_progress(state: CoreState, sequence: Sequence) -> None:
    """Keep the view of a partial prefill true."""
    view = sequence.view
    view.done_tokens = sequence.launched
    view.cached_tokens = sequence.cached_tokens
    view.remaining_ns = state.predictor.prefill_ns(
        sequence.target, sequence.launched, state.config.max_num_batched_tokens
    )


def preempt(state: CoreState, replica: Replica, sequence: Sequence, reason: PreemptReason, by: Sequence | None) -> None:
    """A resident waits again. It gets in line once its steps in flight have completed."""
    replica.vacate(sequence)
    sequence.transition(State.WAITING)
    state.num_waiting += 1
    state.touch(sequence)
    state.decide(
        Preempted,
        request=sequence.request,
        index=sequence.index,
        replica=replica.index,
        reason=reason,
        by=None if by is None else (by.request, by.index),
    )
    if not sequence.in_flight and reason != "lost":
        enqueue(state, sequence)


def make_room(state: CoreState, replica: Replica, grower: Sequence) -> bool:
    """Free a block for a decode: from the least urgent partial prefill or decode below it, else from itself.

    Returns False if the grower was preempted. Residents less urgent than the grower have no row in the step yet,
    because decodes get theirs most urgent first and chunks after all decodes.
    """
    victim: Sequence | None = None
    for resident in reversed(replica.running):
        if resident is grower:
            break
        if resident.state is State.PREFILL:
            victim = resident
            break
        if victim is None:
            victim = resident
    if victim is None:
        preempt(state, replica, grower, "memory", None)
        return False
    preempt(state, replica, victim, "memory", grower)
    return True


def evict_for(state: CoreState, replica: Replica, candidate: Candidate) -> bool:
    """Evict residents for the head of the queue and admit it, if that suffices; else leave all as it was.

    Returns whether it was admitted. Nothing is done where it fits without.
    """
    margin = state.eviction_margin()
    if not replica.running or not _may_evict(replica.running[-1], candidate.urgency, margin):
        return False
    fit = measure(state, replica, candidate.sequence)
    needs_slot = len(replica.running) >= state.config.max_num_seqs
    if fit.num_lacking <= 0 and not needs_slot:
        return False
    victims = _choose_victims(state, replica, candidate, fit, margin)
    if victims is None:
        return False
    for victim in victims:
        victim.evictions += 1
        preempt(state, replica, victim, "admission", candidate.sequence)
    admit(state, replica, candidate, measure(state, replica, candidate.sequence))
    return True


def _choose_victims(
    state: CoreState, replica: Replica, candidate: Candidate, fit: Fit, margin: int | None
) -> list[Sequence] | None:
    """The least urgent residents whose leaving gives the candidate what it lacks; None if that is not enough."""
    references = replica.pool.references
    hits = dict.fromkeys(fit.hits)
    left: dict[int, int] = {}
    victims = []
    lacking = fit.num_lacking
    needs_slot = len(replica.running) >= state.config.max_num_seqs
    for resident in reversed(replica.running):
        if lacking <= 0 and not needs_slot:
            break
        if not _may_evict(resident, candidate.urgency, margin):
            break
        if resident.evictions >= state.config.max_evictions:
            continue
        victims.append(resident)
        needs_slot = False
        for block in resident.table:
            left[block] = left.get(block, references[block]) - 1
            lacking -= left[block] == 0 and block not in hits
    return victims if lacking <= 0 and not needs_slot else None


def _may_evict(resident: Sequence, urgency: Urgency, margin: int | None) -> bool:
    priority, key = urgency[0], urgency[1]
    if resident.urgency[0] != priority:
        return resident.urgency[0] > priority
    return margin is not None and key + margin < resident.urgency[1]
