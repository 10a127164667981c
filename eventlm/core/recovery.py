"""Another engine goes on with a run whose engine died: all workers are lost at once, and all requests to other servers.
What the sequences have stays, and so do deadlines, timers, pauses and predictors.

No sequence is suspected of having killed its worker, but the engine itself may die of one: one that gets no token
between so many recoveries in a row ends with `error`. Counted are those that have been computed or sent, or whose
grammar is built, even if they wait again. One that only ever waited in line had no part in what the engine died of, so
a crowd does not end with the request that it stands behind.
"""

from __future__ import annotations

from eventlm.core.forwarding import lose_attempts
from eventlm.core.sequence_manager import finish
from eventlm.core.state.core_state import CoreState, Recoveries
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.worker_facts import lose
from eventlm.events import Recovered

#: A sequence ends with the last of so many recoveries in a row without a token.
MOST_RECOVERIES = 3


def recover(state: CoreState, fact: Recovered) -> None:
    """The engine that decided so far is gone, with all that surrounded its core."""
    for replicaset in state.replicasets:
        if replicaset.forwards is not None:
            lose_attempts(state, replicaset)
            continue
        for replica in replicaset.replicas:
            if replica.up:
                lose(state, replica)
    _end_repeated(state)


def _end_repeated(state: CoreState) -> None:
    sequences = [sequence for request in state.requests.values() for sequence in request.sequences]
    for sequence in sequences:
        if sequence.state is State.FINISHED or not _took_part(sequence):
            continue
        before = state.recoveries.get(sequence.id)
        count = before.in_a_row if before is not None and before.num_tokens == sequence.num_tokens else 0
        if count + 1 < MOST_RECOVERIES:
            state.recoveries[sequence.id] = Recoveries(count + 1, sequence.num_tokens)
        else:
            finish(state, sequence, "error", sequence.num_output_tokens)


def _took_part(sequence: Sequence) -> bool:
    return sequence.residency > 0 or sequence.state is State.WAITING_FOR_GRAMMAR
