"""Copies of worlds: fast copies, which a search makes for each transition, and compact ones for worlds that wait their
turn.

Attributes that never change in place are shared by all copies. `CHANGED` names the others; a test makes sure that it is
complete.
"""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Callable
from copyreg import dispatch_table
from io import BytesIO
from typing import Any, NamedTuple

from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.plugin import SequenceView
from eventlm.core.predictor import Predictor
from eventlm.core.state.backend_state import Attempts, BackendCapacity, Forwards
from eventlm.core.state.block_pool import BlockPool
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.loads import Loads
from eventlm.core.state.prefix_index import Holder, PrefixIndex
from eventlm.core.state.replica import ChunkRow, Replica, StepInFlight
from eventlm.core.state.replicaset import LossCounts, Plugins, Replicaset
from eventlm.core.state.sequence import AdmittedRequest, Sequence
from eventlm.core.state.state_pool import Residence, StatePool
from eventlm.core.state.turns import Tally, Turns
from eventlm.core.state.waiting_queue import Candidate, WaitingQueue
from tests.world.scopes.world import World


class Changed(NamedTuple):
    """The attributes of a class that change in place. flat: those whose items do not change; deep: the others."""

    flat: tuple[str, ...] = ()
    deep: tuple[str, ...] = ()


CHANGED = {
    World: Changed(("left", "chances"), ("core",)),
    Core: Changed((), ("state",)),
    CoreState: Changed(
        ("due", "group", "timers", "retries", "recoveries"),
        ("replicasets", "replicas", "requests", "touched"),
    ),
    Replicaset: Changed(
        ("partial_keys", "suspects"),
        (
            "tally", "prefixes", "_turns", "_loads", "replicas", "shared_queue", "queues", "unrouted", "losses",
            "forwards",
        ),
    ),
    Replica: Changed(
        ("awaited", "forget"), ("_awaiting", "_tally", "capacity", "in_flight", "pool", "queue", "running", "states")
    ),
    BlockPool: Changed(
        ("_changes", "_name", "references", "tree"), ("_children", "_free", "_holder", "_idle", "_states")
    ),
    StatePool: Changed(("_copies", "_free", "_pins"), ("_residents",)),
    WaitingQueue: Changed(("_keys", "_priorities"), ("_head", "_heap", "_passed", "members")),
    Tally: Changed(("changed", "moved", "ups")),
    Turns: Changed(("_with_room", "_listed", "_standing", "_due")),
    Loads: Changed(("_in_order", "_known")),
    PrefixIndex: Changed((), ("held", "awaited")),
    Holder: Changed((), ("_table",)),
    Forwards: Changed((), ("attempts", "resting")),
    AdmittedRequest: Changed((), ("sequences",)),
    Sequence: Changed(("block_names", "block_table"), ("view", "paths")),
}  # fmt: skip

_Memo = dict[int, Any]
_Copier = Callable[[Any, _Memo], Any]


def copy(world: World) -> World:
    """An independent copy of a world, which goes on in the same way."""
    return _OBJECTS[World](world, {})  # type: ignore[no-any-return]


def pack(world: World) -> bytes:
    """A copy of a world in a tenth of the memory."""
    file = BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(world)
    return zlib.compress(file.getvalue(), 1)


def unpack(packed: bytes) -> World:
    """Restore a world that was packed in this process."""
    return pickle.loads(zlib.decompress(packed))  # type: ignore[no-any-return]  # noqa: S301


#: Objects that all worlds of a scope share, and the position of each in the list, by id.
_shared: list[Any] = []
_places: dict[int, int] = {}


def _share(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    if id(value) not in _places:
        _places[id(value)] = len(_shared)
        _shared.append(value)
    return _shared_at, (_places[id(value)],)


def _shared_at(place: int) -> Any:
    return _shared[place]


def _object(kind: type, changed: Changed) -> _Copier:
    """A function that copies objects of a class, each only once. Its code names each attribute, which is twice as fast
    as a loop.
    """
    lines = ["def copy_one(value, memo):", " key = id(value)", " if key in memo: return memo[key]"]
    lines.append(" copied = memo[key] = make(kind)")
    if hasattr(kind, "__slots__"):
        shared = [name for name in kind.__slots__ if name not in (*changed.flat, *changed.deep)]
        lines += [f" copied.{name} = value.{name}" for name in shared]
    else:
        lines.append(" copied.__dict__.update(value.__dict__)")
    lines += [f" copied.{name} = value.{name}.copy()" for name in changed.flat]
    copiers = {name: _DEEP.get(f"{kind.__name__}.{name}", _one) for name in changed.deep}
    lines += [f" copied.{name} = {_INLINE.get(copier, _CALL).format(name=name)}" for name, copier in copiers.items()]
    lines.append(" return copied")
    names: dict[str, Any] = {"kind": kind, "make": kind.__new__, "objects": _OBJECTS}
    names |= {f"copy_{name}": copier for name, copier in copiers.items()}
    exec("\n".join(lines), names)
    return names["copy_one"]  # type: ignore[no-any-return]


def _one(value: Any, memo: _Memo) -> Any:
    return None if value is None else _OBJECTS[type(value)](value, memo)


def _many(values: list[Any], memo: _Memo) -> list[Any]:
    return [_OBJECTS[type(value)](value, memo) for value in values]


def _by_name(values: dict[Any, Any], memo: _Memo) -> dict[Any, Any]:
    return {key: _OBJECTS[type(value)](value, memo) for key, value in values.items()}


def _flats(values: list[Any], memo: _Memo) -> list[Any]:
    # Copying an empty ordered dictionary is slow.
    return [value.copy() if value else type(value)() for value in values]


def _flats_by_name(values: dict[Any, Any], memo: _Memo) -> dict[Any, Any]:
    return {key: value.copy() for key, value in values.items()}


def _table(values: dict[int, int], memo: _Memo) -> dict[int, int]:
    """Copy a table of an index only once: replicas hold the same table."""
    if id(values) not in memo:
        memo[id(values)] = values.copy()
    return memo[id(values)]  # type: ignore[no-any-return]


def _entries(values: list[tuple[Any, ...]] | None, memo: _Memo) -> list[tuple[Any, ...]] | None:
    """Copy the entries of a waiting queue; the last item of each is its sequence."""
    return None if values is None else [(*entry[:5], _one(entry[5], memo)) for entry in values]


def _candidate(found: Candidate | None, memo: _Memo) -> Candidate | None:
    return None if found is None else Candidate(found.urgency, _one(found.sequence, memo))


def _steps(steps: deque[StepInFlight], memo: _Memo) -> deque[StepInFlight]:
    return deque(
        StepInFlight(
            step.step,
            step.launch_seq,
            _many(step.decodes, memo),
            [ChunkRow(_one(row.sequence, memo), row.start, row.end, row.final) for row in step.chunks],
            step.most,
            step.predicted_ns,
        )
        for step in steps
    )


#: How the code of `_object` copies attributes: the commonest kinds without a call.
_CALL = "copy_{name}(value.{name}, memo)"
_INLINE = {
    _one: "None if (one := value.{name}) is None else objects[type(one)](one, memo)",
    _many: "[objects[type(one)](one, memo) for one in value.{name}]",
}
#: How to copy deep attributes that are not a single object.
_DEEP: dict[str, _Copier] = {
    "CoreState.replicasets": _many,
    "CoreState.replicas": _many,
    "CoreState.requests": _by_name,
    "CoreState.touched": _by_name,
    "Replicaset.replicas": _many,
    "Replicaset.queues": _many,
    "Replicaset.unrouted": _by_name,
    "Replica.in_flight": _steps,
    "Replica.running": _many,
    "BlockPool._children": _flats_by_name,
    "BlockPool._free": _flats,
    "BlockPool._idle": _flats,
    "StatePool._residents": _by_name,
    "WaitingQueue._head": _candidate,
    "WaitingQueue._heap": _entries,
    "WaitingQueue._passed": _entries,
    "WaitingQueue.members": _many,
    "PrefixIndex.held": _table,
    "PrefixIndex.awaited": _table,
    "Holder._table": _table,
    "Forwards.attempts": _by_name,
    "Forwards.resting": _by_name,
    "AdmittedRequest.sequences": _many,
    "Sequence.paths": _flats_by_name,
}
_OBJECTS: dict[type, _Copier] = {
    kind: lambda value, memo: value.__copy__()
    for kind in (SequenceView, BackendCapacity, LossCounts, Attempts, Residence)
}
_REDUCERS = dispatch_table | dict.fromkeys((CoreConfig, Plugins, Predictor), _share)
_OBJECTS |= {kind: _object(kind, changed) for kind, changed in CHANGED.items()}
