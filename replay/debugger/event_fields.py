"""Fields of events as names of an expression, read from lines without decoding whole events.

`event` is the tag, `s` the number, `time` in ns of the run, `cause` the number of the event that led to this one. Any
other name is that of a field with a number or a text, or with a list, which counts as its length. An event without the
field has no value for it.
"""

from __future__ import annotations

import types
from functools import reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct, UnsetType

from eventlm.bus.log_reader import LogLine
from eventlm.events import DECISIONS, FACTS, MARKERS, Arrived, Checkpoint, Header, Preempted, Snapshot
from eventlm.events.base import Event
from eventlm.replay.expressions.evaluation import Value
from eventlm.scheduling_params import SchedulingParams

#: Of every event.
COMMON = ("event", "s", "time", "cause")
#: Names for fields that have other ones in the log.
ALIASES = {"tokens": "num_tokens", "class": "service_class"}
#: Of `preempt`: the request that it was for.
PREEMPTOR = "by"
_LEFT_OUT = {"s", "ts", "c", "p"}
#: How a list is read: its items are not.
_STORED: dict[type, Any] = {list: list[msgspec.Raw]}


def _kind(kind: Any) -> type | None:
    """int, str, bool or list, if a field's type is one of these."""
    if kind in (int, str, bool):
        return kind  # type: ignore[no-any-return]
    if get_origin(kind) is list:
        return list
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [_kind(each) for each in get_args(kind)]
        return kinds[0] if len(set(kinds)) == 1 else None
    return None


def _tag(kind: type[Event]) -> str:
    return str(kind.__struct_config__.tag)


def _fields_of(struct: type[Struct]) -> dict[str, tuple[type, Value]]:
    """By name: the type, and the value of an event that leaves it out."""
    found: dict[str, tuple[type, Value]] = {}
    for field in msgspec.structs.fields(struct):
        kind = _kind(field.type)
        if kind is not None and field.name not in _LEFT_OUT:
            default = None if field.default is msgspec.NODEFAULT else field.default
            found[field.name] = (kind, 0 if kind is list else default)
    return found


#: What `forward` and `backend_state` say of a server has these names too. In a condition they mean the gauges.
NAMES_OF_GAUGES = ("running", "waiting")
#: Of `arrive`: those of its scheduling parameters.
_SCHEDULING = _fields_of(SchedulingParams)


def _all_fields() -> dict[str, dict[str, tuple[type, Value]]]:
    found = {
        _tag(kind): {} if kind in (Header, Checkpoint, Snapshot) else _fields_of(kind)
        for kind in FACTS + DECISIONS + MARKERS
    }
    # A request's number is that of its arrival.
    found[_tag(Arrived)] |= {"request": (int, None), **_SCHEDULING}
    found[_tag(Preempted)][PREEMPTOR] = (int, None)
    for fields in found.values():
        for name in NAMES_OF_GAUGES:
            fields.pop(name, None)
    return found


#: By tag, its fields by name: type, and the value where a line leaves it out.
FIELDS = _all_fields()
NAMES = frozenset([*COMMON, *ALIASES, *(name for fields in FIELDS.values() for name in fields)])


def has_field(tag: str, name: str) -> bool:
    """Whether events of this tag have a value for a name."""
    return name in COMMON or ALIASES.get(name, name) in FIELDS[tag]


class FieldReader:
    """Reads the values of some names from lines."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._own = {name: ALIASES.get(name, name) for name in names if name in NAMES and name not in COMMON}
        wanted = sorted(set(self._own.values()))
        nested = [name for name in wanted if name in _SCHEDULING]
        fields: list[tuple[str, Any, Any]] = [(name, _type_of(name) | UnsetType, UNSET) for name in wanted]
        inner = msgspec.defstruct("_Scheduling", [(name, _type_of(name) | UnsetType, UNSET) for name in nested])
        fields += [("scheduling", inner | UnsetType, UNSET)] if nested else []
        fields += [("ts", int, 0), ("c", int, 0)]
        self._nested = frozenset(nested)
        self._decode = msgspec.json.Decoder(msgspec.defstruct("_Fields", fields)).decode

    def read(self, line: LogLine) -> dict[str, Value]:
        """The values by name."""
        found: Any = self._decode(line.body + b"}")
        values: dict[str, Value] = {"event": line.tag, "s": line.s, "time": found.ts, "cause": found.c}
        fields = FIELDS[line.tag]
        for name, own in self._own.items():
            if own not in fields:
                values[name] = None
                continue
            if line.tag == "arrive" and own == "request":
                values[name] = line.s
                continue
            of = found.scheduling if line.tag == "arrive" and own in self._nested else found
            value = UNSET if of is UNSET else getattr(of, own)
            if value is UNSET:
                value = fields[own][1]
            elif own == PREEMPTOR:
                value = value[0] if value else None
            elif isinstance(value, list):
                value = len(value)
            values[name] = value
        return values


def _type_of(name: str) -> Any:
    if name == PREEMPTOR:
        return list[int] | None
    kinds = dict.fromkeys(fields[name][0] for fields in FIELDS.values() if name in fields)
    return reduce(or_, (_STORED.get(kind, kind) for kind in kinds))
