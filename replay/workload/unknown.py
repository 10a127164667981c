"""What a recorded run does not show of its requests, drawn from what it does show of others.

The run cannot show how long an answer would have become that was rejected, dropped or cut short, nor how long a client
would have waited for a first token that came in time. It shows how long other answers became, and after what time other
clients left. An answer that was cut short counts for being longer than what was seen of it, and a client that got its
first token for being more patient than that. This is the Kaplan-Meier estimate of a distribution, drawn from by passing
the weight of what was cut on to all that became longer.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from msgspec import structs

from eventlm.replay.workload.workload import NEVER, Fate, Patience, Workload, WorkloadRequest

#: How many times unknown things are drawn. An odd number has a middle one.
NUM_DRAWS = 5
#: With fewer known values of a kind of request, those of a wider kind count too.
MIN_KNOWN = 5

End = TypeVar("End")


class _Known(Generic[End]):
    """All values of one kind of request: each with what ended it there, or None where it would have gone on."""

    def __init__(self) -> None:
        self.num_known = 0
        self._seen: list[tuple[int, End | None]] = []

    def add(self, value: int, end: End | None, *, is_known: bool) -> None:
        """Take in a value."""
        self._seen.append((value, end))
        self.num_known += is_known

    def resample(self, chance: random.Random) -> None:
        """Before the first draw: what was seen is a sample itself, and another run would have had another."""
        self._seen = sorted(chance.choices(self._seen, k=len(self._seen)), key=_value)

    def draw(self, above: int, chance: random.Random) -> End | None:
        """What ends one of the values larger than `above`; None: none of them ends."""
        while True:
            first = bisect_right(self._seen, above, key=_value)
            if first == len(self._seen):
                return None
            above, end = self._seen[chance.randrange(first, len(self._seen))]
            if end is not None:
                return end


class _Kinds(Generic[End]):
    """Values by kind of request."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Known[End]] = {}

    def add(self, request: WorkloadRequest, value: int, end: End | None, *, is_known: bool) -> None:
        """Take in a value of a request."""
        for key in _keys(request):
            self._kinds.setdefault(key, _Known()).add(value, end, is_known=is_known)

    def resample(self, chance: random.Random) -> None:
        """Before the first draw."""
        for kind in self._kinds.values():
            kind.resample(chance)

    def draw(self, request: WorkloadRequest, above: int, chance: random.Random) -> End | None:
        """What ends a value of the request that is larger than `above`; None: nothing."""
        kinds = [self._kinds[key] for key in _keys(request)]
        kind = next((kind for kind in kinds if kind.num_known >= MIN_KNOWN), kinds[-1])
        return kind.draw(above, chance)


def num_draws(workload: Workload) -> int:
    """How many draws a workload takes: one says it all if everything is known."""
    has_unknown = any(request.has_unknown_length or request.patience is not None for request in workload.requests)
    return NUM_DRAWS if has_unknown else 1


def draw_unknown(workload: Workload, *, seed: int) -> Workload:
    """The workload with every length and every client's patience known. Equal seeds give equal workloads, whatever
    engine they are for.
    """
    if num_draws(workload) == 1:
        return workload
    lengths: _Kinds[Fate] = _Kinds()
    patience: _Kinds[Patience] = _Kinds()
    for request in workload.requests:
        for fate in request.fates:
            lengths.add(request, *_length(request, fate), is_known=fate.seen_tokens is None)
        patience.add(request, request.waited_ns, request.patience, is_known=request.patience is not None)
    chance = random.Random(f"{seed}")
    lengths.resample(chance)
    patience.resample(chance)
    requests = []
    for place, request in enumerate(workload.requests):
        chance = random.Random(f"{seed}/{place}")
        fates = [_drawn(request, fate, lengths, chance) for fate in request.fates]
        limit = request.patience
        if limit is None and (drawn := patience.draw(request, request.waited_ns, chance)) is not None:
            limit = structs.replace(drawn, s=0)
        requests.append(structs.replace(request, fates=fates, patience=limit))
    return structs.replace(workload, requests=requests)


def _value(seen: tuple[int, object]) -> int:
    return seen[0]


def _keys(request: WorkloadRequest) -> Iterator[Hashable]:
    """The kinds that a request is of, the narrowest first. Prompts are alike within a factor of two."""
    arrival = request.arrival
    yield arrival.scheduling.service_class, arrival.prompt_tokens.bit_length()
    yield arrival.scheduling.service_class
    yield ()


def _length(request: WorkloadRequest, fate: Fate) -> tuple[int, Fate | None]:
    """Output tokens, and the fate that ended them."""
    if fate.seen_tokens is not None:
        return fate.seen_tokens, None
    end = _end(fate)
    return (end, fate) if end < NEVER else (request.arrival.max_tokens, None)


def _end(fate: Fate) -> int:
    return min(fate.worker_end, fate.text_end.position if fate.text_end is not None else NEVER)


def _drawn(request: WorkloadRequest, fate: Fate, lengths: _Kinds[Fate], chance: random.Random) -> Fate:
    """The fate with a known end. An end in the text is the worker's where nobody looks for ends in the text."""
    if fate.seen_tokens is None:
        return fate
    other = lengths.draw(request, fate.seen_tokens, chance)
    fate = structs.replace(fate, seen_tokens=None)
    if other is None:
        return fate
    if (
        request.arrival.scheduling.has_text_ends
        and other.text_end is not None
        and other.text_end.position == _end(other)
    ):
        return structs.replace(fate, text_end=structs.replace(other.text_end, s=0))
    delay_ns = other.answer_delay_ns if fate.answer_delay_ns is None else fate.answer_delay_ns
    return structs.replace(fate, worker_end=_end(other), worker_reason=other.worker_reason, answer_delay_ns=delay_ns)
