"""The first decision in which two runs of one workload differ, and what led to it.

Each stream (see `comparable`) is compared separately. Of their first differences the earliest counts, by the time since
the first request that both runs have.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.events import Decision, Event
from eventlm.events.codec import DECISION_TAGS, encode_body
from eventlm.replay.diff.comparable import ComparableNames, comparable
from eventlm.replay.diff.excerpt import excerpts
from eventlm.replay.diff.story import Run, seconds, tell
from eventlm.replay.verify.divergence import as_object
from eventlm.types import OnProgress

_LINES_PER_PROGRESS = 4096
_STEPS_PER_LOOK = 1024
#: Most requests that a difference is told of.
MAX_NAMED = 4
_MAX_LINE_CHARS = 150


class SideOfDifference(Struct, frozen=True, kw_only=True):
    """One run's part: the decision as a JSON object (None: it has none there), the same without what is alike in both
    (see `eventlm.replay.diff.excerpt`), when it came, counted from the first request that both runs have, and the
    line of what led to it."""

    decision: dict[str, Any] | None = None
    excerpt: dict[str, Any] | None = None
    after_ns: int | None = None
    cause: str = ""


class FirstDifference(Struct, frozen=True, kw_only=True):
    """what: the difference in a sentence. details: more of them, about the requests that it names."""

    what: str
    details: list[str]
    a: SideOfDifference
    b: SideOfDifference


class _Place(NamedTuple):
    """A decision by its time since the first shared request, and its seq."""

    after_ns: int
    s: int
    content: Hashable


class _Candidate(NamedTuple):
    """A difference: when it first showed, and the decisions, one of which may be missing."""

    key: tuple[int, int]
    a: _Place | None
    b: _Place | None


def find_first_difference(
    reader_a: LogReader,
    reader_b: LogReader,
    names_a: ComparableNames,
    names_b: ComparableNames,
    *,
    arrivals: Sequence[tuple[int, int]],
    on_progress: OnProgress | None = None,
) -> FirstDifference | None:
    """None if all decisions are alike. `arrivals`: when each pair of requests arrived in the runs, by its number less
    one."""
    origin_a, origin_b = arrivals[0] if arrivals else (0, 0)
    a, b = Run(reader_a, names_a, origin_a), Run(reader_b, names_b, origin_b)
    found = _Comparison().run(a, b, on_progress)
    return _tell(found, a, b, arrivals) if found is not None else None


def _places(run: Run) -> Iterator[tuple[Hashable, _Place]]:
    """Its decisions, each with its stream."""
    for line in run.reader:
        if line.tag in DECISION_TAGS:
            event = line.event()
            assert isinstance(event, Decision)
            found = comparable(event, run.names)
            if found is not None:
                yield found.stream, _Place(event.ts - run.origin_ns, event.s, found.content)


class _Comparison:
    """Holds those decisions of either run that the other has not come to yet, by stream."""

    def __init__(self) -> None:
        self._waiting: tuple[defaultdict[Hashable, deque[_Place]], ...] = (defaultdict(deque), defaultdict(deque))
        self._best: _Candidate | None = None

    def run(self, a: Run, b: Run, on_progress: OnProgress | None) -> _Candidate | None:
        """Read both logs, a decision of each in turn, until no earlier difference can come."""
        for number, both in enumerate(zip_longest(_places(a), _places(b))):
            for side, item in enumerate(both):
                if item is not None:
                    self._take(side, *item)
            if on_progress is not None and number % _LINES_PER_PROGRESS == 0:
                on_progress(a.reader.position, a.reader.size_bytes)
            if self._best is not None and number % _STEPS_PER_LOOK == 0 and self._is_over(both):
                return self._best
        for side, streams in enumerate(self._waiting):
            for waiting in streams.values():
                self._differ(*((waiting[0], None) if side == 0 else (None, waiting[0])))
        return self._best

    def _take(self, side: int, stream: Hashable, place: _Place) -> None:
        waiting = self._waiting[1 - side]
        if stream not in waiting:
            self._waiting[side][stream].append(place)
            return
        partner = waiting[stream].popleft()
        if not waiting[stream]:
            del waiting[stream]
        if partner.content != place.content:
            self._differ(*((place, partner) if side == 0 else (partner, place)))

    def _differ(self, a: _Place | None, b: _Place | None) -> None:
        key = min(place[:2] for place in (a, b) if place is not None)
        if self._best is None or key < self._best.key:
            self._best = _Candidate(key, a, b)

    def _is_over(self, both: tuple[tuple[Hashable, _Place] | None, ...]) -> bool:
        """Whether both runs are behind the best difference, and nothing before it waits for its partner."""
        assert self._best is not None
        latest = [item[1] for item in both if item is not None]
        waiting = [places[0] for streams in self._waiting for places in streams.values()]
        return all(place[:2] > self._best.key for place in (*latest, *waiting))


def _tell(found: _Candidate, a: Run, b: Run, arrivals: Sequence[tuple[int, int]]) -> FirstDifference:
    event_a = a.event(found.a.s) if found.a is not None else None
    event_b = b.event(found.b.s) if found.b is not None else None
    story = tell(event_a, event_b, a, b)
    details = story.details
    for number in story.pairs[:MAX_NAMED]:
        after = [ns - run.origin_ns for ns, run in zip(arrivals[number - 1], (a, b), strict=True)]
        details.append(f"#{number} arrived {seconds(after[0])} after the first request in A, {seconds(after[1])} in B")
    excerpt_a, excerpt_b = excerpts(event_a, event_b, a.names, b.names)
    return FirstDifference(
        what=story.what, details=details, a=_side(a, event_a, excerpt_a), b=_side(b, event_b, excerpt_b)
    )


def _side(run: Run, event: Event | None, excerpt: dict[str, Any] | None) -> SideOfDifference:
    if event is None:
        return SideOfDifference()
    cause = ""
    if run.reader.header.s < event.c < event.s:
        text = (encode_body(run.event(event.c)) + b"}").decode()
        cause = text if len(text) <= _MAX_LINE_CHARS else text[: _MAX_LINE_CHARS - 4] + " ..."
    return SideOfDifference(decision=as_object(event), excerpt=excerpt, after_ns=event.ts - run.origin_ns, cause=cause)
