"""The live requests of a run go on in another one: under other limits or plug-ins, or in another version.

Of what the run before left, only its requests are taken: how far they are, their deadlines, their seeds. Its replicas,
caches and queues stay behind, and so do attempts at other servers. Nothing is decided here. A sequence that ran or
stood in line waits for a replica again; one whose end was seen still waits for the end of its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import UNSET, Struct, structs

from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.core.state.sequence import State
from eventlm.core.state.snapshot import RequestSnapshot, SequenceRow, StateSnapshot
from eventlm.errors import InvariantError
from eventlm.events import Arrived


class CarriedState(Struct, frozen=True, kw_only=True):
    """What a snapshot says of requests. The rest of it is not read: another version may have written it otherwise."""

    next_seq: int
    now_ns: int
    paused: bool
    rng_digest: str
    timers: list[tuple[int, int]]
    requests: list[RequestSnapshot]
    recoveries: list[tuple[int, int, int, int, int]] = []

    @property
    def arrivals(self) -> dict[int, Arrived]:
        """Of all requests, by their numbers."""
        return {each.arrival.s: each.arrival for each in self.requests}


_read = msgspec.json.Decoder(CarriedState).decode
_decode = msgspec.json.Decoder(StateSnapshot).decode


def read_carried(snapshot: bytes) -> CarriedState:
    """The requests of a snapshot. Raises InvariantError if they cannot be read."""
    try:
        return _read(snapshot)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvariantError(f"the requests of the run before cannot be read: {error}") from error


def carry(
    taken: CarriedState,
    arrivals: Mapping[int, Arrived],
    config: CoreConfig,
    plugins: Plugins,
    predictor: Predictor,
    others: Iterable[SetParts] = (),
) -> Core:
    """A core that goes on with requests of another run; it has no worker yet.

    arrivals: of those that go on, by their numbers, as they are here: with the replicaset and the block names of this
    core. The rest is as of `Core`.
    """
    others = list(others)
    fresh = _decode(Core(config, plugins, predictor, others).snapshot())
    requests = [
        RequestSnapshot(arrivals[each.arrival.s], [_waiting_row(row) for row in each.sequences])
        for each in taken.requests
        if each.arrival.s in arrivals
    ]
    unrouted: list[list[tuple[int, int]]] = [[] for _ in fresh.sets]
    for request in requests:
        arrival = request.arrival
        names = [(arrival.s, row.index) for row in request.sequences if row.state is State.WAITING]
        unrouted[arrival.replicaset] += names
    sets = [
        structs.replace(each, unrouted=waiting) for each, waiting in zip(fresh.others or [], unrouted[1:], strict=True)
    ]
    changed = structs.replace(
        fresh,
        next_seq=taken.next_seq,
        now_ns=taken.now_ns,
        paused=taken.paused,
        rng_digest=taken.rng_digest,
        timers=sorted(timer for timer in taken.timers if timer[1] in arrivals),
        requests=requests,
        recoveries=[each for each in taken.recoveries if each[0] in arrivals] or UNSET,
        unrouted=unrouted[0],
        others=sets or UNSET,
    )
    core = Core.restored(config, plugins, msgspec.json.encode(changed), others, is_changed=True)
    _predict(core)
    return core


def _waiting_row(row: SequenceRow) -> SequenceRow:
    """A sequence as it is when it has lost its replica, its place in a queue and the names of its blocks."""
    stays = row.state in (State.WAITING_FOR_GRAMMAR, State.CLOSING)
    return row._replace(
        state=row.state if stays else State.WAITING,
        prefill_tokens=row.num_tokens,
        launched_tokens=0,
        pending_tokens=0,
        in_flight=0,
        sampling_in_flight=0,
        num_tree_blocks=0,
        shipped_blocks=0,
        replica=-1,
        home=-1,
        generation=0,
        key=0,
        key_generation=-1,
        block_table=[],
        view_prompt_tokens=row.num_tokens,
        view_done_tokens=0,
        view_cached_tokens=0,
        key_in_line=0,
        generated_names=[],
    )


def _predict(core: Core) -> None:
    """How long prompts take here."""
    state = core.state
    for request in state.requests.values():
        replicaset = state.replicasets[request.arrival.replicaset]
        for sequence in request.sequences:
            view = sequence.view
            view.prefill_ns = replicaset.prefill_ns(sequence.prompt_tokens)
            view.remaining_ns = replicaset.prefill_ns(view.prompt_tokens)
