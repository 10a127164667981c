"""The whole state of a core as JSON, and back: what a later segment of a trace starts from.

Taken between drains only. It holds what decides and cannot be computed from the rest; sums, counts, lines and running
lists follow from it, so a snapshot cannot contradict itself there. It holds nothing that is not in the facts.

Of a sequence that has ended nothing is kept but its name: rows of it that are still in flight change nothing any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from eventlm.config import CoreConfig
from eventlm.core.plugin import SequenceView
from eventlm.core.predictor import NUM_COEFFICIENTS, Predictor
from eventlm.core.state.backend_state import Attempts, BackendCapacity, Forwards
from eventlm.core.state.block_pool import PoolSnapshot
from eventlm.core.state.core_state import CoreState, Recoveries, timer_share
from eventlm.core.state.digest import to_hex
from eventlm.core.state.replica import ChunkRow, Replica, StepInFlight
from eventlm.core.state.replicaset import LossCounts, Plugins, Replicaset, SetParts, Suspect
from eventlm.core.state.sequence import AdmittedRequest, Sequence, State
from eventlm.core.state.state_pool import StatesSnapshot
from eventlm.errors import InvariantError, UsageError
from eventlm.events import Arrived
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import FinishReason, SequenceId


class SequenceRow(NamedTuple):
    """A sequence that has not ended. The fields up to `block_table` are attributes of `Sequence` by the same names,
    those from `view_prompt_tokens` on attributes of its view. `key_in_line` is the key of its urgency,
    `generated_names` are its block names after those of its arrival.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    state: State
    num_tokens: int
    prefill_tokens: int
    launched_tokens: int
    pending_tokens: int
    in_flight: int
    sampling_in_flight: int
    num_tree_blocks: int
    shipped_blocks: int
    residency: int
    replica: int
    home: int
    generation: int
    key: int
    key_generation: int
    evictions: int
    skips: int
    cached_tokens: int
    closing_reason: FinishReason | None
    block_table: list[int]
    view_prompt_tokens: int
    view_prefill_ns: int
    view_remaining_ns: int
    view_done_tokens: int
    view_cached_tokens: int
    view_output_tokens: int
    key_in_line: int
    generated_names: list[int]


_NUM_OWN, _NUM_READ = SequenceRow._fields.index("view_prompt_tokens"), SequenceRow._fields.index("key_in_line")
_OWN_FIELDS = SequenceRow._fields[:_NUM_OWN]
_VIEW_FIELDS = tuple(name.removeprefix("view_") for name in SequenceRow._fields[_NUM_OWN:_NUM_READ])
_read = attrgetter(*_OWN_FIELDS, *(f"view.{name}" for name in _VIEW_FIELDS))


class RequestSnapshot(Struct, frozen=True, array_like=True):
    """A live request and those of its sequences that have not ended."""

    arrival: Arrived
    sequences: list[SequenceRow]


class StepSnapshot(Struct, frozen=True, array_like=True):
    """A step in flight. Rows are named by (request, index); chunks go on as `ChunkRow` does."""

    step: int
    launch_seq: int
    decodes: list[tuple[int, int]]
    chunks: list[tuple[int, int, int, int, bool]]
    most: list[int]
    predicted_ns: int


class ReplicaSnapshot(Struct, frozen=True, kw_only=True):
    """A replica without its residents, which follow from the sequences' states."""

    up: bool
    epoch: int
    next_step: int
    steps: list[StepSnapshot]
    forget: list[tuple[int, int]]
    pool: PoolSnapshot
    capacity: BackendCapacity | UnsetType = UNSET
    states: StatesSnapshot | UnsetType = UNSET


class ForwardsSnapshot(Struct, frozen=True, kw_only=True):
    """What a set of other servers has beside its replicas. Sequences are named by (request, index)."""

    attempts: list[tuple[int, int, Attempts]]
    resting: list[tuple[int, int]]
    balance_ppm: int


class SetSnapshot(Struct, frozen=True, kw_only=True):
    """A replicaset without its replicas and sequences."""

    policy: str
    policy_generation: int
    round_generation: int
    partial_keys: list[tuple[int, int, int]]
    predictor: list[int]
    num_routed: int
    unrouted: list[tuple[int, int]]
    suspects: list[tuple[int, int, int, int, int, int]]
    losses: LossCounts
    forwards: ForwardsSnapshot | UnsetType = UNSET


class StateSnapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state between two drains. `timers` is the heap as it is, with the timers of requests that have ended.

    The fields that `SetSnapshot` has too are those of the first replicaset, `others` has the further ones. `replicas`
    are those of all sets.
    """

    next_seq: int
    now_ns: int
    paused: bool
    policy: str
    policy_generation: int
    round_generation: int
    partial_keys: list[tuple[int, int, int]]
    predictor: list[int]
    num_routed: int
    rng_digest: str
    timers: list[tuple[int, int]]
    unrouted: list[tuple[int, int]]
    suspects: list[tuple[int, int, int, int, int, int]]
    losses: LossCounts
    requests: list[RequestSnapshot]
    replicas: list[ReplicaSnapshot]
    others: list[SetSnapshot] | UnsetType = UNSET
    forwards: ForwardsSnapshot | UnsetType = UNSET
    retries: list[tuple[int, int, int, int]] | UnsetType = UNSET
    #: (request, index, in_a_row, num_tokens), see `Recoveries`.
    recoveries: list[tuple[int, int, int, int, int]] | UnsetType = UNSET

    @property
    def sets(self) -> list[StateSnapshot | SetSnapshot]:
        """All replicasets in their order."""
        return [self, *(self.others or [])]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StateSnapshot)


def take(state: CoreState) -> bytes:
    """The state as one JSON object. Equal states give equal bytes. Raises InvariantError inside a drain."""
    if state.drain_open or state.group:
        raise InvariantError(f"a snapshot was asked for inside the drain of event {state.next_seq - 1}")
    first, *others = [_take_set(state, replicaset) for replicaset in state.replicasets]
    return _encoder.encode(
        StateSnapshot(
            next_seq=state.next_seq,
            now_ns=state.now_ns,
            paused=state.paused,
            rng_digest=to_hex(state.rng_digest),
            timers=state.timers,
            requests=[
                RequestSnapshot(request.arrival, [_row(s) for s in request.sequences if s.state is not State.FINISHED])
                for request in state.requests.values()
            ],
            replicas=[_take_replica(replica) for replica in state.replicas],
            others=others or UNSET,
            retries=state.retries or UNSET,
            recoveries=[(*name, *each) for name, each in state.recoveries.items()] or UNSET,
            **{name: getattr(first, name) for name in SetSnapshot.__struct_fields__},
        )
    )


def _take_set(state: CoreState, replicaset: Replicaset) -> SetSnapshot:
    keys = sorted(replicaset.partial_keys.items())
    return SetSnapshot(
        policy=replicaset.policy_name,
        policy_generation=replicaset.policy_generation,
        round_generation=replicaset.round_generation,
        # Under a policy that is not static they are read anew in each round.
        partial_keys=[
            (*name, key) for name, key in keys if replicaset.policy.static and name.request in state.requests
        ],
        predictor=replicaset.predictor.coefficients(),
        num_routed=replicaset.num_routed,
        unrouted=list(replicaset.unrouted),
        suspects=[(*name, *suspect) for name, suspect in replicaset.suspects.items()],
        losses=replicaset.losses,
        forwards=UNSET if replicaset.forwards is None else _take_forwards(replicaset.forwards),
    )


def _take_forwards(forwards: Forwards) -> ForwardsSnapshot:
    return ForwardsSnapshot(
        attempts=[(*identity, attempts) for identity, attempts in forwards.attempts.items()],
        resting=list(forwards.resting),
        balance_ppm=forwards.balance_ppm,
    )


def _row(sequence: Sequence) -> Any:
    """A SequenceRow as a bare tuple: this runs once for each live sequence while the engine waits."""
    num_given = len(sequence.arrival.blocks)
    names = sequence.block_names
    return (*_read(sequence), sequence.urgency[1], names[num_given:] if len(names) > num_given else [])


def _take_replica(replica: Replica) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        up=replica.up,
        epoch=replica.epoch,
        next_step=replica.next_step,
        steps=[
            StepSnapshot(
                step.step,
                step.launch_seq,
                [sequence.id for sequence in step.decodes],
                [(*row.sequence.id, *row[1:]) for row in step.chunks],
                step.most,
                step.predicted_ns,
            )
            for step in replica.in_flight
        ],
        forget=list(replica.forget),
        pool=replica.pool.snapshot(),
        capacity=UNSET if replica.capacity is None else replica.capacity,
        states=UNSET if replica.states is None else replica.states.snapshot(),
    )


def restore(config: CoreConfig, plugins: Plugins, snapshot: bytes, others: Iterable[SetParts] = ()) -> CoreState:
    """The state that a snapshot was taken of. Of the other sets the predictors are the snapshot's too.

    Raises InvariantError if it is none, or one of a core with another configuration or other plug-ins.
    """
    try:
        return _restore(config, plugins, _decoder.decode(snapshot), list(others))
    except (msgspec.DecodeError, LookupError, ValueError, UsageError) as error:
        raise InvariantError(f"the snapshot cannot be restored: {type(error).__name__}: {error}") from error


def _restore(config: CoreConfig, plugins: Plugins, taken: StateSnapshot, others: list[SetParts]) -> CoreState:
    sets = taken.sets
    num_replicas = config.num_replicas + sum(each.config.num_replicas for each in others)
    if len(taken.replicas) != num_replicas or len(taken.predictor) != NUM_COEFFICIENTS:
        raise ValueError(f"it has {len(taken.replicas)} replicas and {len(taken.predictor)} coefficients")
    if len(sets) != 1 + len(others):
        raise ValueError(f"it has {len(sets)} replicasets instead of {1 + len(others)}")
    state = CoreState(config, plugins, Predictor.from_coefficients(taken.predictor), others)
    state.next_seq, state.now_ns, state.paused = taken.next_seq, taken.now_ns, taken.paused
    state.rng_digest = int(taken.rng_digest, 16)
    for request in taken.requests:
        state.requests[request.arrival.s] = _restore_request(request)
    live = {s.id: s for request in state.requests.values() for s in request.sequences if s.state is not State.FINISHED}
    state.touched = dict(live)
    _restore_timers(state, taken.timers)
    state.retries = taken.retries or []
    state.recoveries = {SequenceId(*found[:2]): Recoveries(*found[2:]) for found in taken.recoveries or []}
    for replicaset, set_taken in zip(state.replicasets, sets, strict=True):
        _restore_set(replicaset, set_taken, live)
    for replica, replica_taken in zip(state.replicas, taken.replicas, strict=True):
        _restore_replica(replica, replica_taken, live)
    _restore_lines(state, live.values())
    for replicaset in state.replicasets:
        replicaset.resume()
    return state


def _restore_set(replicaset: Replicaset, taken: StateSnapshot | SetSnapshot, live: dict[SequenceId, Sequence]) -> None:
    replicaset.policy_name, replicaset.policy = taken.policy, replicaset.plugins.policies[taken.policy]
    replicaset.policy_generation, replicaset.round_generation = taken.policy_generation, taken.round_generation
    replicaset.partial_keys = {SequenceId(request, index): key for request, index, key in taken.partial_keys}
    replicaset.predictor = Predictor.from_coefficients(taken.predictor)
    replicaset.num_routed = taken.num_routed
    for name in taken.unrouted:
        replicaset.unrouted[SequenceId(*name)] = live[SequenceId(*name)]
    replicaset.suspects = {SequenceId(*found[:2]): Suspect(*found[2:]) for found in taken.suspects}
    replicaset.losses = taken.losses
    if replicaset.forwards is not None and taken.forwards is not UNSET:
        _restore_forwards(replicaset.forwards, taken.forwards, live)


def _restore_forwards(forwards: Forwards, taken: ForwardsSnapshot, live: dict[SequenceId, Sequence]) -> None:
    forwards.attempts = {SequenceId(request, index): attempts for request, index, attempts in taken.attempts}
    forwards.resting = {SequenceId(*name): live[SequenceId(*name)] for name in taken.resting}
    forwards.balance_ppm = taken.balance_ppm


def _restore_request(taken: RequestSnapshot) -> AdmittedRequest:
    arrival = taken.arrival
    sequences = [_ended(arrival, index) for index in range(arrival.n)]
    for row in taken.sequences:
        sequences[row.index] = _restore_sequence(arrival, row)
    request = AdmittedRequest(arrival, sequences)
    request.num_unfinished = len(taken.sequences)
    return request


def _restore_sequence(arrival: Arrived, row: SequenceRow) -> Sequence:
    sequence = Sequence(arrival, row.index, _view(arrival, row.index))
    for name, value in zip(_OWN_FIELDS, row, strict=False):
        setattr(sequence, name, value)
    for name, value in zip(_VIEW_FIELDS, row[_NUM_OWN:], strict=False):
        setattr(sequence.view, name, value)
    sequence.urgency = (arrival.scheduling.priority, row.key_in_line, arrival.s, row.index)
    sequence.block_names += row.generated_names
    return sequence


def _view(arrival: Arrived, index: int) -> SequenceView:
    return SequenceView.of(arrival, index, prefill_ns=0)


def _ended(arrival: Arrived, index: int) -> Sequence:
    sequence = Sequence(arrival, index, _view(arrival, index))
    sequence.state = State.FINISHED
    return sequence


def _restore_timers(state: CoreState, timers: list[tuple[int, int]]) -> None:
    state.timers = timers
    state.timers_digest = sum(timer_share(*timer) for timer in timers)
    for _, request in timers:
        if request in state.requests:
            state.requests[request].has_timer = True
        else:
            state.num_dead_timers += 1


def _restore_replica(replica: Replica, taken: ReplicaSnapshot, live: dict[SequenceId, Sequence]) -> None:
    if any(len(step.most) != len(step.decodes) + len(step.chunks) for step in taken.steps):
        raise ValueError(f"a step of replica {replica.index} has other rows than it was launched for")
    residents = [s for s in live.values() if s.resident and s.replica == replica.index]
    replica.restore_residents(residents)
    if replica.capacity is not None and taken.capacity is not UNSET:
        replica.capacity = taken.capacity
    if taken.up:
        replica.start_worker(taken.epoch)
    replica.epoch, replica.next_step = taken.epoch, taken.next_step
    replica.forget = [SequenceId(*name) for name in taken.forget]
    replica.pool.restore(taken.pool, [s.block_table for s in residents])
    if replica.states is not None:
        if taken.states is UNSET:
            raise ValueError(f"replica {replica.index} has no state slots")
        replica.states.restore(taken.states)
    ended: dict[SequenceId, Sequence] = {}

    def find(request: int, index: int) -> Sequence:
        name = SequenceId(request, index)
        if name not in live and name not in ended:
            ended[name] = _ended(
                Arrived(s=request, prompt_tokens=1, max_tokens=1, scheduling=SchedulingParams(model="")), index
            )
        return live.get(name) or ended[name]

    replica.in_flight = deque(
        StepInFlight(
            step.step,
            step.launch_seq,
            [find(*name) for name in step.decodes],
            [ChunkRow(find(request, index), start, end, final) for request, index, start, end, final in step.chunks],
            step.most,
            step.predicted_ns,
        )
        for step in taken.steps
    )


def _restore_lines(state: CoreState, live: Iterable[Sequence]) -> None:
    """Who waits with nothing in flight, and not for a router, is in line: by the key of a static policy. Others read
    their keys before they look at a queue.
    """
    for s in live:
        replicaset = state.set_of(s)
        replicaset.num_closing += s.state is State.CLOSING
        replicaset.num_waiting += s.state in (State.WAITING, State.WAITING_FOR_GRAMMAR)
        resting = () if replicaset.forwards is None else replicaset.forwards.resting
        if s.state is State.WAITING and not s.in_flight and s.id not in replicaset.unrouted and s.id not in resting:
            replicaset.line_up(s, s.key if replicaset.policy.static else s.urgency[1])
