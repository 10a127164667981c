"""The invariants of the core: all of them after every event in tests, and a part now and then in production."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from eventlm.core.state.backend_state import Forwards
from eventlm.core.state.core_state import CoreState, sequence_share
from eventlm.core.state.digest import MASK
from eventlm.core.state.kv_groups import group_at
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State
from eventlm.errors import InvariantError, LivenessError
from eventlm.types import SequenceId, ceil_div

#: Blocks of a pool that are checked at a time while an engine serves.
_PART_BLOCKS = 2048


def validate(state: CoreState) -> None:
    """Raises InvariantError with all that is wrong with the state; it costs a pass over everything."""
    found: list[str] = []
    for replica in state.replicas:
        found += _pool_problems(replica)
    for replicaset in state.replicasets:
        found += _index_problems(replicaset)
    _check(state, found)


def validate_part(state: CoreState, turn: int) -> None:
    """The same, but of a few blocks, which are others each turn: pools may have millions. Lists of free blocks and the
    index of prefixes are left out.
    """
    replica = state.replicas[turn % len(state.replicas)]
    num_parts = ceil_div(replica.pool.num_blocks, _PART_BLOCKS)
    first = turn // len(state.replicas) % num_parts * _PART_BLOCKS
    _check(state, _pool_problems(replica, range(first, min(first + _PART_BLOCKS, replica.pool.num_blocks))))


def _check(state: CoreState, found: list[str]) -> None:
    """Raises InvariantError if something was `found`, or anything else is wrong."""
    sequences = [s for request in state.requests.values() for s in request.sequences]
    for replica in state.replicas:
        found += _replica_problems(replica)
    found += _place_problems(state, sequences)
    for replicaset in state.replicasets:
        found += _set_problems(replicaset, [s for s in sequences if s.replicaset == replicaset.index])
    state.add_up_sequences()
    total = sum(sequence_share(sequence) for sequence in sequences)
    if (total & MASK) != (state.sequences_digest & MASK):
        found.append("the incremental digest of the sequences differs from the full one")
    if found:
        raise InvariantError(f"after event {state.next_seq - 1}: " + "; ".join(found))


def validate_liveness(state: CoreState) -> None:
    """Raises LivenessError if a sequence waits and nothing is under way. For the state after a marked fact.

    What can be under way: a step, a worker's start, a front end's `text_end`, a grammar, a request to another server or
    the wait for the next; or the engine is paused.
    """
    if state.paused:
        return
    stuck = [
        not any(replica.in_flight or (replica.capacity and replica.running) for replica in replicaset.replicas)
        and not (replicaset.forwards and replicaset.forwards.resting)
        and any(replica.up for replica in replicaset.replicas)
        for replicaset in state.replicasets
    ]
    for request in state.requests.values():
        for sequence in request.sequences:
            if stuck[sequence.replicaset] and sequence.state in (State.WAITING, State.PREFILL, State.DECODE):
                raise LivenessError(f"after event {state.next_seq - 1}: nothing is in flight, but {sequence} waits")


def _pool_problems(replica: Replica, blocks: range | None = None) -> list[str]:
    tables = [sequence.block_table for sequence in replica.running]
    return [f"replica {replica.index}: {problem}" for problem in replica.pool.problems(tables, blocks)]


def _replica_problems(replica: Replica) -> list[str]:
    where = f"replica {replica.index}: "
    config = replica.config
    found = []
    if replica.states is not None:
        residents = [s.id for s in replica.running]
        found += [where + problem for problem in replica.states.problems(residents, replica.pool.tree)]
    if [s.urgency for s in replica.running] != sorted(s.urgency for s in replica.running):
        found.append(where + "the residents are out of order")
    if replica.num_partial != sum(s.state is State.PREFILL for s in replica.running):
        found.append(where + "the count of partial prefills is wrong")
    if replica.admitted_tokens != sum(s.prefill_tokens for s in replica.running):
        found.append(where + "the count of admitted tokens is wrong")
    if len(replica.running) > config.max_residents:
        found.append(where + f"{len(replica.running)} residents, more than allowed")
    if len(replica.in_flight) > config.steps_in_flight:
        found.append(where + f"{len(replica.in_flight)} steps in flight, more than allowed")
    for step in replica.in_flight:
        if len(step.most) > config.max_num_seqs:
            found.append(where + f"step {step.step} has {len(step.most)} rows, more than max_num_seqs")
    for step in list(replica.in_flight)[config.stages - 1 : -1]:
        if step.is_long(config):
            found.append(where + f"a step is planned after step {step.step}, which takes {step.predicted_ns} ns")
    # Another server that gets no more may still answer what it has.
    has_work = bool(replica.running and replica.capacity is None) or bool(replica.in_flight)
    if not replica.up and (has_work or len(replica.queue)):
        found.append(where + "its worker is lost, but it still has sequences")
    if not replica.up and replica.capacity is None and replica.pool.tree:
        found.append(where + "its worker is lost, but its cache can be hit")
    find_problems = _resident_problems if replica.capacity is None else _forwarded_problems
    for sequence in replica.running:
        found += [f"{where}{sequence} {problem}" for problem in find_problems(replica, sequence)]
    return found


def _forwarded_problems(replica: Replica, sequence: Sequence) -> list[str]:
    """Of a sequence that another server has. Its output is the server's affair, and its blocks may be too few."""
    found = _tree_problems(replica, sequence)
    if sequence.state is not State.DECODE or sequence.replica != replica.index:
        found.append("is not resident here")
    return found


def _resident_problems(replica: Replica, sequence: Sequence) -> list[str]:
    block_size = replica.config.block_size
    found = []
    if not sequence.resident or sequence.replica != replica.index:
        found.append("is not resident here")
    if len(sequence.block_table) > ceil_div(sequence.max_total_tokens, block_size):
        found.append("has more blocks than its limit can fill")
    if len(sequence.block_table) < ceil_div(sequence.prefill_tokens, block_size):
        found.append("has fewer blocks than its prefill needs")
    if sequence.num_tokens + sequence.pending_tokens > sequence.max_total_tokens:
        found.append("may grow beyond its limit")
    if sequence.room_tokens != min(len(sequence.block_table) * block_size + 1, sequence.max_total_tokens):
        found.append("counts its room wrongly")
    if sequence.sampling_in_flight > replica.config.decodes_in_flight_per_seq:
        found.append("has more sampling rows in flight than allowed")
    if (sequence.state is State.DECODE) != (sequence.launched_tokens == sequence.prefill_tokens):
        found.append("is in the wrong state for its prefill")
    if replica.pool.num_groups > 1:
        groups = list(map(replica.pool.group_of, sequence.block_table))
        if groups != [group_at(replica.config, groups[0], index) for index in range(len(groups))]:
            found.append(f"has blocks in the groups {groups[:8]}, which do not follow from its shards")
    return found + _tree_problems(replica, sequence)


def _tree_problems(replica: Replica, sequence: Sequence) -> list[str]:
    for index, block in enumerate(sequence.block_table[: sequence.num_tree_blocks]):
        node = replica.pool.tree.get(sequence.block_names[index])
        if node is None or node[0] != block:
            return [f"holds block {block} at index {index}, which the tree has not"]
    return []


def _place_problems(state: CoreState, sequences: list[Sequence]) -> list[str]:
    """Every sequence is in exactly one place."""
    found = []
    queues = [queue for replicaset in state.replicasets for queue in replicaset.queues]
    indices: dict[tuple[int, int], int] = {}
    unrouted = [replicaset.unrouted.values() for replicaset in state.replicasets]
    resting = [each.forwards.resting.values() for each in state.replicasets if each.forwards is not None]
    for members in [*(q.members for q in queues), *(r.running for r in state.replicas), *unrouted, *resting]:
        for sequence in members:
            indices[sequence.id] = indices.get(sequence.id, 0) + 1
    for sequence in sequences:
        ended = sequence.ended
        unplaced = (
            ended
            or sequence.state is State.WAITING_FOR_GRAMMAR
            or (sequence.state is State.WAITING and sequence.in_flight > 0)
        )
        if indices.pop(sequence.id, 0) != (0 if unplaced else 1):
            found.append(f"{sequence} is in the wrong number of places")
        if ended and sequence.block_table:
            found.append(f"{sequence} has ended, but holds blocks")
        if (sequence.ticket != 0) and sequence.state is not State.WAITING:
            found.append(f"{sequence} is in line, but does not wait")
    if not state.recoveries.keys() <= {s.id for s in sequences if s.state is not State.FINISHED}:
        found.append("recoveries are counted of a sequence that does not live")
    if indices:
        found.append(f"unknown sequences {sorted(indices)[:4]} are in a queue or run")
    for queue in queues:
        if queue.num_tokens != sum(s.num_tokens for s in queue.members):
            found.append("a queue counts its tokens wrongly")
    return found


def _set_problems(replicaset: Replicaset, sequences: list[Sequence]) -> list[str]:
    """What is wrong with the counts of a set, given its sequences."""
    found = []
    if not replicaset.suspects.keys() <= {sequence.id for sequence in sequences if not sequence.ended}:
        found.append("a sequence that does not live is suspected")
    num_closing = sum(s.state is State.CLOSING for s in sequences)
    if num_closing != replicaset.num_closing:
        found.append(f"{num_closing} sequences close, {replicaset.num_closing} are counted")
    num_waiting = sum(s.state in (State.WAITING, State.WAITING_FOR_GRAMMAR) for s in sequences)
    if num_waiting != replicaset.num_waiting:
        found.append(f"{num_waiting} sequences wait, {replicaset.num_waiting} are counted")
    members = [s for queue in replicaset.queues for s in queue.members] + list(replicaset.unrouted.values())
    if any(s.replicaset != replicaset.index for s in members):
        found.append(f"replicaset {replicaset.index} has sequences of another")
    if replicaset.forwards is not None:
        found += _forwards_problems(replicaset, replicaset.forwards, {sequence.id: sequence for sequence in sequences})
    tally = replicaset.tally
    if tally.ups != [replica.index for replica in replicaset.replicas if replica.up]:
        found.append(f"replicaset {replicaset.index} counts its workers wrongly")
    if tally.num_running != sum(len(replica.running) for replica in replicaset.replicas):
        found.append(f"replicaset {replicaset.index} counts its residents wrongly")
    if replicaset.plugins.router.reads_prefixes:
        found += [
            f"replica {replica.index} counts the blocks that are awaited wrongly"
            for replica in replicaset.replicas
            if replica.awaited != Counter(name for s in _awaiting(replica) for name in s.block_names)
        ]
    return found


def _index_problems(replicaset: Replicaset) -> list[str]:
    prefixes = replicaset.prefixes
    if prefixes is None:
        return []
    held = _table([replica.pool.tree for replica in replicaset.replicas])
    awaited = _table([replica.awaited for replica in replicaset.replicas])
    same = (prefixes.held, prefixes.awaited) == (held, awaited)
    return [] if same else [f"the index of replicaset {replicaset.index} differs from its replicas"]


def _forwards_problems(replicaset: Replicaset, forwards: Forwards, sequences: dict[SequenceId, Sequence]) -> list[str]:
    """What is wrong with the attempts of a set of other servers."""
    found = []
    live = {identity for identity, sequence in sequences.items() if not sequence.ended}
    if not forwards.attempts.keys() <= live:
        found.append("a sequence that does not live has attempts")
    under_way = [identity for identity, attempts in forwards.attempts.items() if attempts.current]
    if sorted(under_way) != sorted(s.id for replica in replicaset.replicas for s in replica.running):
        found.append("not the residents have attempts under way")
    hedges = Counter(attempts.hedge_replica for attempts in forwards.attempts.values() if attempts.hedge)
    counted = {each.index: each.capacity.num_hedges for each in replicaset.replicas if each.capacity is not None}
    if {index: number for index, number in counted.items() if number} != hedges:
        found.append(f"there are the hedges {dict(hedges)}, and {counted} are counted")
    return found


def _awaiting(replica: Replica) -> list[Sequence]:
    return replica.queue.members + replica.partials()


def _table(names: Seq[Iterable[int]]) -> dict[int, int]:
    """Replicas as bits by the names that they have."""
    found: dict[int, int] = {}
    for position, each in enumerate(names):
        for name in each:
            found[name] = found.get(name, 0) | 1 << position
    return found
