"""A core that goes on from a snapshot of itself is the same core."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from eventlm.core.plugin import SequenceView
from eventlm.core.state.block_pool import BlockPool
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.snapshot import ReplicaSnapshot, SequenceRow, SetSnapshot, StateSnapshot, restore, take
from eventlm.core.state.state_pool import StatePool
from eventlm.core.state.validate import validate
from eventlm.core.state.waiting_queue import WaitingQueue
from eventlm.errors import InvariantError
from eventlm.events import Arrived
from eventlm.scheduling_params import SchedulingParams
from tests.core.rig import Rig
from tests.simulation import MemoryLog, Simulation
from tests.workload import Chaos, draw_machine, make_core, with_states

#: What follows from the rest, is the same for all, counts within one event only, or decides nothing.
DERIVED = {
    CoreState: {
        "cause", "decisions", "plans", "latest_plans", "drain_open", "group", "due", "timers_digest", "num_dead_timers",
        "touched", "sequences_digest", "witness",
    },
    Replicaset: {
        "index", "first", "config", "plugins", "policy", "margin", "replicas", "shared_queue", "queues", "num_closing",
        "num_waiting", "tally", "prefixes", "_turns", "_loads", "_num_changes", "_num_seen",
    },
    Replica: {
        "index", "config", "replicaset", "queue", "running", "num_partial", "admitted_tokens", "awaited", "_tally",
        "_awaiting", "_reads_prefixes",
    },
    BlockPool: {
        "num_blocks", "blocks_per_group", "num_groups", "_children", "references", "_name", "_changes", "_states",
        "_holder", "_numbers",
    },
    StatePool: {"num_slots", "_num_spare", "_pins", "_num_promised"},
    Sequence: {
        "arrival", "replicaset", "request", "id", "prompt_tokens", "max_total_tokens", "ticket", "num_tickets",
        "contribution", "room_tokens", "paths",
    },
}  # fmt: skip
#: What a snapshot holds by another name.
RENAMED = {
    CoreState: {"replicasets": "policy"},
    Replicaset: {"policy_name": "policy"},
    Replica: {"in_flight": "steps"},
    BlockPool: {"_free": "free", "_idle": "idle", "_digest": "digest"},
    StatePool: {"_free": "free", "_copies": "copies", "_residents": "residents"},
    Sequence: {"urgency": "key_in_line", "block_names": "generated_names", "view": "view_done_tokens"},
}


class Relay(Simulation):
    """A simulation whose core is replaced, after some of its drains, by one restored from its snapshot."""

    def __init__(self, seed: int, *, every: int, **options: Any) -> None:
        super().__init__(seed, check_every=0, **options)
        self.num_replaced = 0
        draws, drain = random.Random(seed), self.engine_core.drain

        def relay(now_ns: int) -> None:
            drain(now_ns)
            core = self.engine_core.core
            if every and draws.randrange(every) == 0:
                taken = take(core.state)
                restored = restore(core.state.replicasets[0].config, core.state.replicasets[0].plugins, taken)
                assert take(restored) == taken
                assert restored.digests() == core.state.digests()
                validate(restored)
                core.state = restored
                self.num_replaced += 1

        self.engine_core.drain = relay  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("every", "num_workloads"), [(1, 3), (7, 9), *(pytest.param(every, 24, marks=pytest.mark.soak) for every in (1, 7))]
)
def test_a_run_goes_on_from_its_snapshots_as_if_nothing_had_been(every: int, num_workloads: int) -> None:
    num_replaced = 0
    for seed in range(num_workloads):
        plain, relayed = MemoryLog(), MemoryLog()
        chaos = Chaos(recoveries=seed % 3)
        Relay(seed, every=0, writer=plain, chaos=chaos).run()
        simulation = Relay(seed, every=every, writer=relayed, chaos=chaos)
        simulation.run()
        assert relayed.bodies == plain.bodies, f"workload {seed}"
        num_replaced += simulation.num_replaced
    assert num_replaced > num_workloads * 50 // every


def _names(thing: object) -> set[str]:
    return set(vars(thing)) if hasattr(thing, "__dict__") else set(type(thing).__slots__)


def test_every_attribute_is_in_the_snapshot_or_known_to_follow_from_it() -> None:
    _, core = make_core(with_states(draw_machine(random.Random(0), 0), 0))
    taken = msgspec.json.decode(take(core.state))
    replica = core.state.replicas[0]
    arrival = Arrived(s=1, prompt_tokens=4, max_tokens=4, scheduling=SchedulingParams(model="fake"))
    sequence = Sequence(arrival, 0, SequenceView.of(arrival, 0, prefill_ns=5))
    held: dict[type[Any], tuple[Any, set[str]]] = {
        CoreState: (core.state, set(StateSnapshot.__struct_fields__)),
        Replicaset: (core.state.replicasets[0], set(SetSnapshot.__struct_fields__)),
        Replica: (replica, set(ReplicaSnapshot.__struct_fields__)),
        BlockPool: (replica.pool, set(taken["replicas"][0]["pool"])),
        StatePool: (replica.states, set(taken["replicas"][0]["states"])),
        Sequence: (sequence, set(SequenceRow._fields)),
    }
    for kind, (thing, names) in held.items():
        assert set(RENAMED[kind].values()) <= names
        known = names | DERIVED[kind] | set(RENAMED[kind])
        assert _names(thing) <= known, f"{kind.__name__}: {sorted(_names(thing) - known)} must be part of a snapshot"
    views = {name.removeprefix("view_") for name in SequenceRow._fields if name.startswith("view_")}
    assert {"request", "index", "priority", "arrival_ns", "deadline_ns", "service_class", "session"} | views == set(
        type(sequence.view).__struct_fields__
    )
    # All of it comes from adding the members again.
    assert _names(WaitingQueue()) == {
        "members", "num_tokens", "digest", "_priorities", "_heap", "_keys", "_head", "_passed",
    }  # fmt: skip


def test_none_is_taken_inside_a_drain() -> None:
    header, core = make_core(draw_machine(random.Random(0), 0))
    core.apply(header)
    core.apply(Arrived(s=1, ts=5, c=0, prompt_tokens=1, max_tokens=1, scheduling=SchedulingParams(model="fake")))
    with pytest.raises(InvariantError, match="inside the drain"):
        take(core.state)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_a_snapshot_of_such_a_core_is_refused(seed: int) -> None:
    _, core = make_core(draw_machine(random.Random(seed), seed))
    taken = msgspec.json.decode(take(core.state))
    for name, value in (
        ("policy", "unheard_of"), ("predictor", [1]), ("replicas", []), ("rng_digest", "x"), ("unrouted", [[1, 0]]),
        ("timers", "x"), ("requests", [[{"t": "arrive", "model": "m", "prompt_tokens": 1, "max_tokens": 1}, [[7]]]]),
    ):  # fmt: skip
        with pytest.raises(InvariantError, match="the snapshot cannot be restored"):
            restore(
                core.state.replicasets[0].config,
                core.state.replicasets[0].plugins,
                msgspec.json.encode(taken | {name: value}),
            )


def test_a_step_in_flight_says_how_long_it_will_take() -> None:
    rig = Rig()
    rig.arrive(4, 9)
    taken = msgspec.json.decode(take(rig.state))
    del taken["replicas"][0]["steps"][0][-1]
    with pytest.raises(InvariantError, match="the snapshot cannot be restored"):
        restore(rig.state.replicasets[0].config, rig.state.replicasets[0].plugins, msgspec.json.encode(taken))


def test_states_are_stored_by_number() -> None:
    assert msgspec.json.encode(State.CLOSING) == b"4"
