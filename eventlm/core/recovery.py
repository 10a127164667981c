"""Another engine goes on with a run whose engine died: all workers are lost at once, and all requests to other servers.
What the sequences have stays, and so do deadlines, timers, pauses and predictors.

No sequence is suspected of having killed its worker, but the engine itself may die of one: one that gets no token
between so many recoveries in a row ends with `error`. Counted are those that the engine has admitted to a replica or
sent, whose grammar it has built or whose text it searches for an end, even if they wait again. One that only waited in
line had no part in what the engine died of, so a crowd does not end with the request that it stands behind.
"""

from __future__ import annotations

from eventlm.core.forwarding import lose_attempts
from eventlm.core.sequence_manager import finish
from eventlm.core.state.core_state import CoreState, Recoveries
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.worker_facts import lose
from eventlm.events import Recovered
from eventlm.types import RESTART

#: A sequence ends with the last of so many recoveries in a row without a token.
MOST_RECOVERIES = 3
_NONE = Recoveries(0, 0, 0)


def recover(state: CoreState, fact: Recovered) -> None:
    """The engine that decided so far is gone, with all that surrounded its core."""
    for replicaset in state.replicasets:
        if replicaset.forwards is not None:
            lose_attempts(state, replicaset)
            continue
        for replica in replicaset.replicas:
            if replica.up:
                lose(state, replica)
    if fact.reason != RESTART:
        _end_repeated(state)


def _end_repeated(state: CoreState) -> None:
    sequences = [sequence for request in state.requests.values() for sequence in request.sequences]
    for sequence in sequences:
        before = state.recoveries.get(sequence.id, _NONE)
        if sequence.state is State.FINISHED or not _took_part(sequence, before):
            continue
        count = before.in_a_row + 1 if before.num_tokens == sequence.num_tokens else 1
        if count < MOST_RECOVERIES:
            state.recoveries[sequence.id] = Recoveries(count, sequence.num_tokens, sequence.residency)
        else:
            finish(state, sequence, "error", sequence.num_output_tokens)


def _took_part(sequence: Sequence, before: Recoveries) -> bool:
    """Whether the engine that died had to do with it. before: as of the beginning of that engine."""
    return sequence.residency > before.residency or sequence.state in (State.WAITING_FOR_GRAMMAR, State.CLOSING)
