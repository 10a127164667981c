"""Fields of events as names of an expression, read from lines without decoding whole events.

`event` is the tag, `s` the number, `time` in ns of the run, `cause` the number of the event that led to this one. Any
other name is that of a field with a number or a text. An event without the field has no value for it.
"""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType

from eventlm.bus.log_reader import LogLine
from eventlm.events import DECISIONS, FACTS, MARKERS, Arrived, Checkpoint, Header, Launched, Preempted, Snapshot
from eventlm.events.base import Event
from eventlm.replay.expressions.evaluation import Value
from eventlm.scheduling_params import SchedulingParams

#: Of every event.
COMMON = ("event", "s", "time", "cause")
#: Names for fields that have other ones in the log.
ALIASES = {"tokens": "num_tokens", "class": "service_class"}
#: Of `launch`: how many rows.
COUNTS = ("decodes", "chunks")
#: Of `preempt`: the request that it was for.
PREEMPTOR = "by"
#: Of `arrive`: fields of its scheduling parameters.
_SCHEDULING = ("kind", "priority", "service_class", "session", "deadline_ns")
_LEFT_OUT = {"s", "ts", "c", "p"}


def _scalar(kind: Any) -> type | None:
    """int, str or bool, if a field's type is one of these."""
    if kind in (int, str, bool):
        return kind  # type: ignore[no-any-return]
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        scalars = [_scalar(each) for each in get_args(kind)]
        return scalars[0] if len(set(scalars)) == 1 else None
    return None


def _tag(kind: type[Event]) -> str:
    return str(kind.__struct_config__.tag)


def _fields_of(kind: type[Event]) -> dict[str, tuple[type, Value]]:
    """By name: the type, and the value of an event that leaves it out."""
    found: dict[str, tuple[type, Value]] = {}
    for field in msgspec.structs.fields(kind):
        scalar = _scalar(field.type)
        if scalar is not None and field.name not in _LEFT_OUT:
            found[field.name] = (scalar, None if field.default is msgspec.NODEFAULT else field.default)
    return found


def _all_fields() -> dict[str, dict[str, tuple[type, Value]]]:
    found = {
        _tag(kind): {} if kind in (Header, Checkpoint, Snapshot) else _fields_of(kind)
        for kind in FACTS + DECISIONS + MARKERS
    }
    scheduling = {field.name: field for field in msgspec.structs.fields(SchedulingParams)}
    arrive = found[_tag(Arrived)]
    # A request's number is that of its arrival.
    arrive["request"] = (int, None)
    for name in _SCHEDULING:
        scalar = _scalar(scheduling[name].type)
        assert scalar is not None
        arrive[name] = (scalar, scheduling[name].default)
    found[_tag(Preempted)][PREEMPTOR] = (int, None)
    for name in COUNTS:
        found[_tag(Launched)][name] = (int, 0)
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
        fields: list[tuple[str, Any, Any]] = [
            (name, _type_of(name) | UnsetType, UNSET) for name in wanted if name not in _SCHEDULING
        ]
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
            of = found.scheduling if own in self._nested else found
            value = UNSET if of is UNSET else getattr(of, own)
            if value is UNSET:
                value = fields[own][1]
            elif own in COUNTS:
                value = len(value)
            elif own == PREEMPTOR:
                value = value[0] if value else None
            values[name] = value
        return values


def _type_of(name: str) -> Any:
    if name in COUNTS:
        return list[msgspec.Raw]
    if name == PREEMPTOR:
        return list[int] | None
    kinds = {fields[name][0] for fields in FIELDS.values() if name in fields}
    found: Any = kinds.pop()
    for kind in kinds:
        found = found | kind
    return found
