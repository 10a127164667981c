"""The workers of all replicas come and go; policies are swapped and caches flushed."""

from __future__ import annotations

from collections.abc import Iterable

from eventlm.core.plugin_calls import ask_policy
from eventlm.core.poison_requests import accuse
from eventlm.core.preemption import preempt
from eventlm.core.sequence_manager import enqueue, finish
from eventlm.core.state.core_state import CoreState, replica_of
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State
from eventlm.errors import InvariantError
from eventlm.events import CacheFlushed, Desynced, PolicySwapped, WorkerLost, WorkerUp


def worker_up(state: CoreState, fact: WorkerUp) -> None:
    """A worker with an empty cache is ready. The one before it is gone, even if its loss was never reported.

    A no-op unless its epoch is newer than every epoch seen so far.
    """
    replica = replica_of(state, fact.replica)
    if fact.epoch <= replica.epoch:
        return
    if replica.up:
        lose(state, replica, accuse(state, replica, crashed=False))
    replica.start_worker(fact.epoch)


def worker_lost(state: CoreState, fact: WorkerLost | Desynced) -> None:
    """Cache and steps in flight are gone; the sequences wait for another worker with the tokens they have.

    Those that are found to kill their workers end (see `eventlm.core.poison_requests`).
    The loss of an older worker is a no-op. The loss of one that never came up is remembered, so that it cannot come up.
    """
    replica = replica_of(state, fact.replica)
    if fact.epoch < replica.epoch:
        return
    replica.epoch = fact.epoch
    if replica.up:
        # One process has its oldest step in hand.
        step = -1 if fact.rank < 0 else fact.step
        crashed = isinstance(fact, WorkerLost) and fact.crashed
        lose(state, replica, accuse(state, replica, crashed=crashed, step=step))


def lose(state: CoreState, replica: Replica, condemned: Iterable[Sequence] = ()) -> None:
    """A replica's worker is gone: all that it had waits for another one. condemned: those that end with it."""
    replicaset = state.set_of(replica)
    homeless = [sequence for sequence in replica.lose_worker() if sequence.state is State.WAITING]
    for sequence in homeless:
        _clear_flight(sequence)
    residents = replica.running[:]
    for sequence in residents:
        _clear_flight(sequence)
        preempt(state, replica, sequence, "lost", None)
    queued = replica.queue.members[:]
    for sequence in queued:
        replica.leave_line(sequence)
    replica.start_anew()
    for sequence in sorted(homeless + residents + queued, key=lambda s: s.id):
        sequence.home = -1
        sequence.replica = -1
        state.touch(sequence)
        replicaset.unrouted[sequence.id] = sequence
    for sequence in condemned:
        finish(state, sequence, "error", sequence.num_output_tokens)


def _clear_flight(sequence: Sequence) -> None:
    sequence.in_flight = 0
    sequence.sampling_in_flight = 0
    sequence.pending_tokens = 0


def swap_policy(state: CoreState, fact: PolicySwapped) -> None:
    """Another policy orders all that wait and the partial prefills; decodes keep the urgency of their admission."""
    for replicaset in state.sets_meant(fact.replicaset):
        _swap_policy(state, replicaset, fact.name)


def _swap_policy(state: CoreState, replicaset: Replicaset, name: str) -> None:
    policy = replicaset.plugins.policies.get(name)
    if policy is None:
        raise InvariantError(f"policy {name!r} was not installed at start")
    replicaset.policy_name, replicaset.policy = name, policy
    replicaset.policy_generation += 1
    replicaset.partial_keys = {}
    partials = [sequence for replica in replicaset.replicas for sequence in replica.partials()]
    if policy.static:
        keys, _ = ask_policy(state, replicaset, [sequence.view for sequence in partials])
        replicaset.partial_keys = {sequence.id: key for sequence, key in zip(partials, keys, strict=True)}
    replicaset.note_all()
    for queue in replicaset.queues:
        members = queue.members[:]
        for sequence in members:
            replicaset.leave_line(sequence)
        for sequence in members:
            enqueue(state, sequence)


def flush_caches(state: CoreState, fact: CacheFlushed) -> None:
    """Forget the cached blocks that no sequence holds. Waiting sequences look their hits up again at admission."""
    for replicaset in state.sets_meant(fact.replicaset):
        for replica in replicaset.replicas:
            replica.pool.flush()
        replicaset.note_all()
