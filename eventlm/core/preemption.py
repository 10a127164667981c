"""Preemption: which residents give way to a growing decode, or to the head of the queue.

Evictions at admission are all or nothing, and a sequence suffers at most `max_evictions` between two of its tokens. A
preemption for memory frees at least the one block that the growing decode needs.
"""

from __future__ import annotations

from typing import Literal

from eventlm.core.admission import Fit, admit, measure
from eventlm.core.sequence_manager import enqueue
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.plan_witness import EvictionWeighed, VictimSeen, VictimVerdict
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.waiting_queue import Candidate
from eventlm.events import Preempted
from eventlm.events.decisions import PreemptReason


def preempt(state: CoreState, replica: Replica, sequence: Sequence, reason: PreemptReason, by: Sequence | None) -> None:
    """A resident waits again. It gets in line once its steps in flight have completed."""
    replica.vacate(sequence)
    sequence.transition(State.WAITING)
    state.set_of(sequence).num_waiting += 1
    state.touch(sequence)
    state.decide(
        Preempted,
        request=sequence.request,
        index=sequence.index,
        replica=replica.index,
        reason=reason,
        by=None if by is None else by.id,
    )
    if not sequence.in_flight and reason != "lost":
        enqueue(state, sequence)


def make_room(state: CoreState, replica: Replica, grower: Sequence, group: int) -> bool:
    """Free a block of a KV group for a decode: from the least urgent partial prefill or decode below it, else from
    itself.

    Returns False if the grower was preempted. Residents less urgent than the grower have no row in the step yet,
    because decodes get theirs most urgent first and chunks after all decodes.
    """
    victim = _memory_victim(state, replica, grower, group)
    if victim is None:
        preempt(state, replica, grower, "memory", None)
        return False
    preempt(state, replica, victim, "memory", grower)
    return True


def _note_victim(
    state: CoreState, replica: Replica, resident: Sequence, needed_by: Sequence, verdict: VictimVerdict
) -> None:
    """reason: only the head of a queue is not resident."""
    if state.witness is not None:
        reason: Literal["memory", "admission"] = "memory" if needed_by.resident else "admission"
        state.witness.append(VictimSeen(replica.index, resident.id, reason, needed_by.id, verdict))


def _memory_victim(state: CoreState, replica: Replica, grower: Sequence, group: int) -> Sequence | None:
    """The least urgent resident below the grower that would free a block there, partial prefills before decodes."""
    pool, references = replica.pool, replica.pool.references
    victim: Sequence | None = None
    for resident in reversed(replica.running):
        if resident is grower:
            break
        partial = resident.state is State.PREFILL
        if not partial and victim is not None:
            _note_victim(state, replica, resident, grower, "spared")
            continue
        # Nearly always the last block is its own; only a sequence that generates nothing can share all it has.
        table = reversed(resident.block_table)
        if not any(references[block] == 1 and pool.group_of(block) == group for block in table):
            _note_victim(state, replica, resident, grower, "shared")
            continue
        victim = resident
        if partial or not replica.num_partial:
            break
    if victim is not None:
        _note_victim(state, replica, victim, grower, "chosen")
    return victim


def evict_for(state: CoreState, replica: Replica, candidate: Candidate) -> None:
    """Evict residents for the head of the queue and admit it, if that suffices; else leave all as it was.

    Nothing is done where it fits without.
    """
    victims = find_victims(state, replica, candidate)
    if not victims:
        return
    # They leave what it lacks if it begins in this KV group. Once they have gone, another one may have least to read.
    first_group = measure(replica, candidate.sequence).first_group
    for victim in victims:
        victim.evictions += 1
        preempt(state, replica, victim, "admission", candidate.sequence)
    admit(state, replica, candidate, measure(replica, candidate.sequence, first_group))


def find_victims(state: CoreState, replica: Replica, candidate: Candidate) -> list[Sequence]:
    """The residents that the head of the queue may evict now to be admitted; empty if it needs none."""
    if not replica.running:
        return []
    least_urgent = replica.running[-1]
    if not _may_evict(state, least_urgent, candidate):
        _note_victim(state, replica, least_urgent, candidate.sequence, "more_urgent")
        return []
    fit = measure(replica, candidate.sequence)
    needs_slot = len(replica.running) >= replica.config.max_residents
    if fit.num_lacking <= 0 and not needs_slot:
        return []
    return _choose_victims(state, replica, candidate, fit, needs_slot=needs_slot) or []


def _choose_victims(
    state: CoreState, replica: Replica, candidate: Candidate, fit: Fit, *, needs_slot: bool
) -> list[Sequence] | None:
    """The least urgent residents whose leaving gives the candidate what it lacks; None if that is not enough."""
    pool, references = replica.pool, replica.pool.references
    hits = {block for block, _ in fit.hits}
    left: dict[int, int] = {}
    victims = []
    lacking, needed_slot = fit.lacking[:], needs_slot
    is_witnessed = state.witness is not None
    for resident in reversed(replica.running):
        if max(lacking) <= 0 and not needs_slot:
            break
        is_exempt = resident.evictions >= replica.config.max_evictions
        if is_exempt or not _may_evict(state, resident, candidate):
            if is_witnessed:
                _note_victim(state, replica, resident, candidate.sequence, "exempt" if is_exempt else "more_urgent")
            continue
        if is_witnessed:
            _note_victim(state, replica, resident, candidate.sequence, "chosen")
        victims.append(resident)
        needs_slot = False
        for block in resident.block_table:
            left[block] = left.get(block, references[block]) - 1
            lacking[pool.group_of(block)] -= left[block] == 0 and block not in hits
    is_enough = max(lacking) <= 0 and not needs_slot
    if state.witness is not None:
        state.witness.append(
            EvictionWeighed(replica.index, candidate.sequence.id, fit.num_lacking, needed_slot, is_enough)
        )
    return victims if is_enough else None


def _may_evict(state: CoreState, resident: Sequence, candidate: Candidate) -> bool:
    """By a lower priority always; within one priority by the policy's margin, if one policy made both keys."""
    priority, key = candidate.urgency[:2]
    if resident.urgency[0] != priority:
        return resident.urgency[0] > priority
    replicaset = state.set_of(resident)
    generation = candidate.sequence.key_generation if replicaset.policy.static else replicaset.round_generation
    if replicaset.margin is None or generation != replicaset.policy_generation or resident.generation != generation:
        return False
    return key + replicaset.margin < resident.urgency[1]
