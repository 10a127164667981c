"""The first decision in which two runs of one workload differ, and what led to it.

Each stream (see `comparable`) is compared separately. The earliest of their first differences counts, by the time since
the first request that both runs have.

Two launches that differ still have most rows in common. An excerpt omits these rows and counts them, and omits the
fields without a difference. Requests are compared by their pair, blocks by their number.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.events import Decision, Event, Launched
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.diff.comparable import ComparableNames, comparable
from eventlm.replay.diff.story import Run, describe, seconds
from eventlm.replay.verify.divergence import as_object, one_line
from eventlm.types import OnProgress

_LINES_PER_PROGRESS = 4096
_PAIRS_PER_CHECK = 1024
#: Requests in the details of a difference, at most.
MAX_NAMED = 4
#: Fields of a launch that are compared by element; all others are single values.
_LISTS = ("decodes", "chunks", "most", "blocks", "forget")


class SideOfDifference(Struct, frozen=True, kw_only=True):
    """One run's part: the decision as a JSON object (None: it has none there), its excerpt, its time since the first
    request that both runs have, and the line of its cause.
    """

    decision: dict[str, Any] | None = None
    excerpt: dict[str, Any] | None = None
    after_ns: int | None = None
    cause: str = ""


class FirstDifference(Struct, frozen=True, kw_only=True):
    """what: the difference in a sentence. details: further sentences about the requests that it names."""

    what: str
    details: list[str]
    a: SideOfDifference
    b: SideOfDifference


class _Located(NamedTuple):
    """What is compared of a decision, with its time since the first shared request and its seq."""

    after_ns: int
    s: int
    content: Hashable


class _Candidate(NamedTuple):
    """A difference: when it first showed, and the decisions, one of which may be missing."""

    key: tuple[int, int]
    a: _Located | None
    b: _Located | None


def find_first_difference(
    reader_a: LogReader,
    reader_b: LogReader,
    names_a: ComparableNames,
    names_b: ComparableNames,
    *,
    arrivals: Sequence[tuple[int, int]],
    on_progress: OnProgress | None = None,
) -> FirstDifference | None:
    """None if all decisions are equal. `arrivals`: when pair number i + 1 of requests arrived in each run."""
    origin_a, origin_b = arrivals[0] if arrivals else (0, 0)
    a, b = Run(reader_a, names_a, origin_a), Run(reader_b, names_b, origin_b)
    found = _Comparison().run(a, b, on_progress)
    return _first_difference(found, a, b, arrivals) if found is not None else None


def _decisions(run: Run) -> Iterator[tuple[Hashable, _Located]]:
    """Its decisions, each with its stream."""
    for line in run.reader:
        if line.tag in DECISION_TAGS:
            event = line.event()
            assert isinstance(event, Decision)
            found = comparable(event, run.names)
            if found is not None:
                yield found.stream, _Located(event.ts - run.origin_ns, event.s, found.content)


class _Comparison:
    """Holds decisions of either run until the other one reaches them, by stream."""

    def __init__(self) -> None:
        self._waiting: tuple[defaultdict[Hashable, deque[_Located]], ...] = (defaultdict(deque), defaultdict(deque))
        self._best: _Candidate | None = None

    def run(self, a: Run, b: Run, on_progress: OnProgress | None) -> _Candidate | None:
        """Read both logs in turn until no earlier difference is possible."""
        for number, both in enumerate(zip_longest(_decisions(a), _decisions(b))):
            for side, item in enumerate(both):
                if item is not None:
                    self._take(side, *item)
            if on_progress is not None and number % _LINES_PER_PROGRESS == 0:
                on_progress(a.reader.position, a.reader.size_bytes)
            if self._best is not None and number % _PAIRS_PER_CHECK == 0 and self._is_over(both):
                return self._best
        for side, streams in enumerate(self._waiting):
            for waiting in streams.values():
                self._differ(*((waiting[0], None) if side == 0 else (None, waiting[0])))
        return self._best

    def _take(self, side: int, stream: Hashable, decision: _Located) -> None:
        waiting = self._waiting[1 - side]
        if stream not in waiting:
            self._waiting[side][stream].append(decision)
            return
        partner = waiting[stream].popleft()
        if not waiting[stream]:
            del waiting[stream]
        if partner.content != decision.content:
            self._differ(*((decision, partner) if side == 0 else (partner, decision)))

    def _differ(self, a: _Located | None, b: _Located | None) -> None:
        key = min(decision[:2] for decision in (a, b) if decision is not None)
        if self._best is None or key < self._best.key:
            self._best = _Candidate(key, a, b)

    def _is_over(self, both: tuple[tuple[Hashable, _Located] | None, ...]) -> bool:
        """Whether both runs are past the best difference, and no earlier decision waits for its partner."""
        assert self._best is not None
        latest = [item[1] for item in both if item is not None]
        waiting = [decisions[0] for streams in self._waiting for decisions in streams.values()]
        return all(decision[:2] > self._best.key for decision in (*latest, *waiting))


def _first_difference(found: _Candidate, a: Run, b: Run, arrivals: Sequence[tuple[int, int]]) -> FirstDifference:
    event_a = a.event(found.a.s) if found.a is not None else None
    event_b = b.event(found.b.s) if found.b is not None else None
    story = describe(event_a, event_b, a, b)
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
    cause = one_line(run.event(event.c)) if run.reader.header.s < event.c < event.s else ""
    return SideOfDifference(decision=as_object(event), excerpt=excerpt, after_ns=event.ts - run.origin_ns, cause=cause)


def excerpts(
    event_a: Event | None, event_b: Event | None, names_a: ComparableNames, names_b: ComparableNames
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The JSON objects of both; of two launches without common elements. `N alike` ends a shortened list."""
    object_a = as_object(event_a) if event_a is not None else None
    object_b = as_object(event_b) if event_b is not None else None
    if object_a is None or object_b is None or not isinstance(event_a, Launched) or not isinstance(event_b, Launched):
        return object_a, object_b
    elements_a, elements_b = _elements(event_a, names_a), _elements(event_b, names_b)
    for name in _LISTS:
        compared = elements_a[name], elements_b[name]
        left_a = _left(object_a.pop(name, []), *compared)
        left_b = _left(object_b.pop(name, []), *compared[::-1])
        if compared[0] != compared[1]:
            object_a[name], object_b[name] = left_a, left_b
    return object_a, object_b


def _left(shown: list[Any], own: Sequence[Hashable], others: Sequence[Hashable]) -> list[Any]:
    """The elements that the other list does not have; all of them if only the order differs."""
    if Counter(own) == Counter(others):
        return shown
    alike = Counter(own) & Counter(others)
    left = []
    for each, element in zip(shown, own, strict=True):
        if alike[element]:
            alike[element] -= 1
        else:
            left.append(each)
    num_alike = len(shown) - len(left)
    return [*left, f"{num_alike:,} alike"] if num_alike else left


def _elements(event: Launched, names: ComparableNames) -> dict[str, list[Hashable]]:
    """The compared elements of each list."""
    rows = [(names.of(row[0]), row[1]) for row in (*event.decodes, *event.chunks)]
    return {
        "decodes": [(names.of(row[0]), *row[1:]) for row in event.decodes],
        "chunks": [(names.of(row[0]), *row[1:]) for row in event.chunks],
        "most": list(zip(rows, event.most, strict=False)),
        "blocks": [(rows[row], first, len(blocks)) for row, first, blocks in event.blocks],
        "forget": [(names.of(request), index) for request, index in event.forget],
    }
