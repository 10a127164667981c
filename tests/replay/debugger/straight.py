"""A straight replay of a run, event by event: what the debugger must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.core.core import Core
from eventlm.events import Arrived, Event, Fact, Marker, Preempted, Snapshot
from eventlm.replay.debugger.condition import Condition
from eventlm.replay.debugger.environment import PositionEnvironment, gauges_of
from eventlm.replay.debugger.event_fields import ALIASES, FIELDS
from eventlm.replay.expressions.evaluation import Value, evaluate
from eventlm.replay.expressions.parser import parse
from eventlm.replay.rebuild import rebuild


def events_of(path: Path) -> list[Event]:
    with LogReader(path) as reader:
        return [line.event() for line in reader]


class StraightReplay:
    """Goes through a run once. states are only those of the core, so nothing of the index is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with LogReader(path) as reader:
            self._rebuilt = rebuild(reader.header)
            self.first_s = reader.header.s
        self.events = events_of(path)

    def walk(self) -> Any:
        """(event, core or None where there is no state), in order."""
        core: Core | None = self._rebuilt.new_core() if self.first_s == 0 else None
        for event in self.events:
            if isinstance(event, Snapshot) and (core is None or core.next_seq != event.s):
                core = self._rebuilt.restored_core(bytes(event.state))
            if isinstance(event, Fact | Marker):
                if core is not None and core.next_seq == event.s:
                    core.apply(event)
                else:
                    core = None
            yield event, core

    def digests(self) -> dict[int, dict[str, str] | None]:
        """By position; None: no state."""
        found: dict[int, dict[str, str] | None] = {}
        last: dict[str, str] | None = None
        for event, core in self.walk():
            if core is None:
                last = None
            elif isinstance(event, Fact | Marker):
                last = core.digests()
            found[event.s] = last
        return found

    def values(self, text: str, kind: str) -> list[tuple[int, tuple[Value, ...]]]:
        """By position that counts for this kind of expression, its values for each replica."""
        expression, needs_gauges = parse(text), Condition(text).reads_gauges
        found = []
        gauges: list[dict[str, Value]] = []
        for event, core in self.walk():
            assert core is not None
            state = core.state
            is_marked = isinstance(event, Fact) and bool(event.p)
            if is_marked:
                gauges = []
                for replica in state.replicas:
                    waiting = [*state.replicasets[0].shared_queue.members, *replica.queue.members]
                    oldest = min((each.arrival.ts for each in waiting), default=None)
                    known = gauges_of(state, replica.index)
                    live = sum(each.num_unfinished for each in state.requests.values())
                    wait = None if oldest is None else event.ts - oldest
                    gauges.append(known | {"oldest_wait": wait, "live": live, "time": event.ts})
            counts = {
                "columns": is_marked,
                "core": isinstance(event, Fact | Marker),
                "lines": True,
                "both": True,
            }[kind]
            if not counts:
                continue
            fields = fields_of(event) if kind in ("lines", "both") else None
            replicas = range(len(state.replicas)) if needs_gauges else range(-1, 0)
            own = None if fields is None else fields["replica"]
            if isinstance(own, int) and needs_gauges:
                replicas = range(own, own + 1)
            found.append(
                (
                    event.s,
                    tuple(
                        evaluate(
                            expression,
                            PositionEnvironment(state, gauges[replica] if gauges else {}, fields, replica),
                        )
                        for replica in replicas
                    ),
                )
            )
        return found


def fields_of(event: Event) -> dict[str, Value]:
    """Every name of an event, from the whole event."""
    tag = str(type(event).__struct_config__.tag)
    found: dict[str, Value] = {"event": tag, "s": event.s, "time": event.ts, "cause": event.c}
    for fields in FIELDS.values():
        for name in fields:
            found.setdefault(name, None)
    whole = msgspec.structs.asdict(event)
    if isinstance(event, Arrived):
        whole |= msgspec.structs.asdict(event.scheduling) | {"request": event.s}
    for name in FIELDS[tag]:
        found[name] = len(whole[name]) if isinstance(whole[name], list) else whole[name]
    if isinstance(event, Preempted):
        found["by"] = event.by[0] if event.by else None
    for alias, name in ALIASES.items():
        found[alias] = found[name]
    return found
