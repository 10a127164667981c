"""Where a recorded run is left: a position between two of its drains, and the core there."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.bus.segment_reader import SegmentReader
from eventlm.core.core import Core
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.rebuild import Changes, rebuild
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.replay.verify.verifier import Found, Verifier
from eventlm.types import NANOSECONDS_PER_SECOND, OnProgress

#: Lines that belong to the events before them.
_CONTINUING = DECISION_TAGS | {"snapshot", "gap"}


class BranchPlace(NamedTuple):
    """Where a branch is asked for: after the drain of an event, or else after the first drain at or after a time."""

    event: int = -1
    time_ns: int = 0

    def describe(self) -> str:
        """In words."""
        return f"event {self.event}" if self.event >= 0 else f"{self.time_ns / NANOSECONDS_PER_SECOND:g} s"


class BranchPoint(NamedTuple):
    """After event `s`, the last of its drain. snapshot: of the core. h: hash of the event's line; "" if not known."""

    s: int
    now_ns: int
    snapshot: bytes
    h: str = ""

    @classmethod
    def of(cls, core: Core, h: str = "") -> BranchPoint:
        """Where a core is now. Raises InvariantError inside a drain."""
        return cls(core.next_seq - 1, core.state.now_ns, core.snapshot(), h)

    @property
    def state(self) -> StateSnapshot:
        """The snapshot as a struct, which is decoded at each call."""
        return msgspec.json.decode(self.snapshot, type=StateSnapshot)


def find_point(
    path: Path | str,
    place: BranchPlace,
    *,
    strict: bool = False,
    trust_local_plugins: bool = False,
    on_progress: OnProgress | None = None,
) -> BranchPoint:
    """Verify a run up to a place, from the beginning of the segment that has it.

    Raises UsageError for a place inside a drain or after the last one, DivergenceError if the run comes out
    otherwise before it, and what LogReader raises.
    """
    with LogReader(path, strict=strict) as log:
        if 0 <= place.event < log.header.s:
            raise UsageError(f"{path} begins with event {log.header.s:,}, after {place.describe()}")
        rebuilt = rebuild(log.header, Changes(trust_local_plugins=trust_local_plugins))
        start = _segment_of(log, place)
        verifier = Verifier(rebuilt, start)
        core, h, last_s, is_inside = verifier.core, "", start.s - 1, False
        for line in log.lines(on_progress, from_s=start.s):
            if last_s < place.event < line.s:
                raise UsageError(
                    f"{path}: {place.describe()} lies in a gap: events {last_s + 1} to {line.s - 1} are missing"
                )
            # Whatever is no decision comes after all that the event before it led to. A snapshot is part of its header.
            if line.tag not in _CONTINUING and last_s >= start.s and _is_reached(place, last_s, core):
                if core.state.drain_open:
                    is_inside = place.event >= 0
                elif is_inside:
                    break
                else:
                    return BranchPoint.of(core, h)
            try:
                verifier.feed(line)
            except Found as found:
                consequence = "there is no state to branch from"
                raise DivergenceError.at(str(path), line, found, rebuilt.drift, consequence) from found
            core, h, last_s = verifier.core, log.last_h, line.s
        if core.state.drain_open or verifier.expected or not _is_reached(place, last_s, core):
            end = f"event {last_s:,}, at {core.state.now_ns / NANOSECONDS_PER_SECOND:.6f} s"
            raise UsageError(f"{path}: {place.describe()} is beyond the end of the last drain before {end}")
        if is_inside:
            raise UsageError(
                f"{path}: event {place.event:,} is inside a drain, whose facts are applied as one; it ends with event "
                f"{core.next_seq - 1:,}: branch there"
            )
        return BranchPoint.of(core, h)


def _segment_of(log: LogReader, place: BranchPlace) -> Header:
    """The header of the last segment that begins before the place."""
    for path in reversed(log.segments[1:]):
        with SegmentReader(path) as segment:
            header = segment.header
        if header.s <= place.event or (place.event < 0 and header.ts < place.time_ns):
            return header
    return log.header


def _is_reached(place: BranchPlace, last_s: int, core: Core) -> bool:
    """Whether the events up to `last_s` reach the place."""
    if place.event >= 0:
        return last_s >= place.event
    return core.state.now_ns >= place.time_ns
