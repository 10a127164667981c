"""Decisions in a form that is comparable between runs: requests by their pair, without positions and times.

Each decision belongs to a stream in which the order counts: the launches, completions or preemptions of a replica, or
the decisions about a request. The order between streams does not count: whether a request was admitted shortly before
or after a launch without it depends on its arrival.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from eventlm.events import (
    Admitted,
    Closing,
    Decision,
    Emitted,
    Finished,
    Forwarded,
    Launched,
    PluginFailed,
    Preempted,
    Rejected,
    Relayed,
    RetrySet,
    Routed,
    TimerSet,
    Withdrawn,
)

#: The number of a pair. Negative: a request from before the log begins, by the order of mention. Text: the seq of a
#: request that only one run has, and which run.
Name = int | str


class Comparable(NamedTuple):
    """A decision's stream, and the content that must be equal at the same position of the stream."""

    stream: Hashable
    content: Hashable


class ComparableNames:
    """Common names of the requests of one run, whose log begins with event `first_s`."""

    def __init__(self, side: str, numbers: Mapping[int, int], first_s: int) -> None:
        self.side = side
        self._numbers = numbers
        self._first_s = first_s
        self._earlier: dict[int, int] = {}
        self._requests = {number: request for request, number in numbers.items()}

    def request(self, number: int) -> int:
        """The request of a pair."""
        return self._requests[number]

    def of(self, request: int) -> Name:
        """The common name of a request; unique if the other run does not have it."""
        if request < self._first_s:
            return self._earlier.setdefault(request, -1 - len(self._earlier))
        return self._numbers.get(request) or f"{request} of {self.side}"

    def is_paired(self, request: int) -> bool:
        """Whether the other run has it too."""
        return request in self._numbers


def comparable(event: Decision, names: ComparableNames) -> Comparable | None:
    """None for a decision about a request that only one of the runs has.

    Only the number of blocks counts: which ones are free depends on the order in which they were released. Epochs and
    step numbers are ignored, as positions are.
    """
    match event:
        case Launched():
            return Comparable(("launch", event.replica), _launch(event, names))
        case Emitted():
            return Comparable(("emit", event.replica), (event.num_tokens, *event.dropped))
        case Preempted():
            by = (names.of(event.by[0]), event.by[1]) if event.by is not None else None
            return Comparable(("preempt", event.replica), (names.of(event.request), event.index, event.reason, by))
        case Forwarded() | RetrySet() | Withdrawn():
            if not names.is_paired(event.request):
                return None
            return Comparable(("request", names.of(event.request)), _of_attempt(event))
        case Relayed():
            return Comparable("relay", (event.num_tokens, *event.dropped))
        case PluginFailed():
            return Comparable("plug-in", event.error)
        case Admitted() | Rejected() | Routed() | Closing() | Finished() | TimerSet():
            if not names.is_paired(event.request):
                return None
            return Comparable(("request", names.of(event.request)), _of_request(event))
    raise TypeError(f"no decision: {event}")


def _launch(event: Launched, names: ComparableNames) -> Hashable:
    return (
        tuple((names.of(row[0]), *row[1:]) for row in event.decodes),
        tuple((names.of(row[0]), *row[1:]) for row in event.chunks),
        tuple(event.most),
        tuple((row, first, len(blocks)) for row, first, blocks in event.blocks),
        tuple((names.of(request), index) for request, index in event.forget),
    )


def _of_attempt(event: Forwarded | RetrySet | Withdrawn) -> Hashable:
    """When it may be sent again is a matter of time, as `ts` is."""
    match event:
        case Forwarded():
            return ("forward", event.index, event.replica, event.attempt, event.cached_tokens, event.hedge)
        case RetrySet():
            return ("retry", event.index, event.replica, event.attempt)
        case Withdrawn():
            return ("withdraw", event.index, event.replica, event.attempt)


def _of_request(event: Admitted | Rejected | Routed | Closing | Finished | TimerSet) -> Hashable:
    match event:
        case Rejected():
            return ("reject", event.reason)
        case Routed():
            return ("route", event.index, event.replica)
        case Closing():
            return ("closing", event.index, event.reason, event.position)
        case Finished():
            return ("finish", event.index, event.reason, event.position, event.cached_tokens)
        case Admitted():
            return "admit"
        case TimerSet():
            return "set_timer"
