"""Draws output lengths and clients' patience that a recorded run does not show.

A run does not show the full length of an answer that was rejected, dropped or cut short, nor how long a client would
have waited for a first token that came in time. These are censored observations. They are drawn from the Kaplan-Meier
estimate of the distribution over similar requests: the weight of a censored observation passes to all longer ones.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from msgspec import structs

from eventlm.replay.workload.workload import NEVER, Patience, SequenceOutput, Workload, WorkloadRequest

#: With fewer known values of a kind of request, a wider kind is used.
MIN_KNOWN = 5

End = TypeVar("End")


class _Known(Generic[End]):
    """All values of one kind of request, each with what ended it, or None if it is censored."""

    def __init__(self) -> None:
        self.num_known = 0
        self._seen: list[tuple[int, End | None]] = []

    def add(self, value: int, end: End | None, *, is_known: bool) -> None:
        """Add an observation."""
        self._seen.append((value, end))
        self.num_known += is_known

    def resample(self, chance: random.Random) -> None:
        """Bootstrap, once before the first draw: the observations are themselves a sample."""
        self._seen = sorted(chance.choices(self._seen, k=len(self._seen)), key=_value)

    def draw(self, above: int, chance: random.Random) -> End | None:
        """What ends a value larger than `above`; None: nothing does."""
        while True:
            first = bisect_right(self._seen, above, key=_value)
            if first == len(self._seen):
                return None
            above, end = self._seen[chance.randrange(first, len(self._seen))]
            if end is not None:
                return end


class _Kinds(Generic[End]):
    """Observations by kind of request."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Known[End]] = {}

    def add(self, request: WorkloadRequest, value: int, end: End | None, *, is_known: bool) -> None:
        """Add an observation of a request."""
        for key in _keys(request):
            self._kinds.setdefault(key, _Known()).add(value, end, is_known=is_known)

    def resample(self, chance: random.Random) -> None:
        """Bootstrap every kind, once before the first draw."""
        for kind in self._kinds.values():
            kind.resample(chance)

    def draw(self, request: WorkloadRequest, above: int, chance: random.Random) -> End | None:
        """What ends the request's value, which is larger than `above`; None: nothing does."""
        kinds = [self._kinds[key] for key in _keys(request)]
        kind = next((kind for kind in kinds if kind.num_known >= MIN_KNOWN), kinds[-1])
        return kind.draw(above, chance)


def has_unknown(workload: Workload) -> bool:
    """Whether there is anything to draw."""
    return any(request.has_unknown_length or request.patience is not None for request in workload.requests)


def draw_unknown(workload: Workload, *, seed: int) -> Workload:
    """The workload with all lengths and clients' patience filled in. Equal seeds give equal workloads."""
    if not has_unknown(workload):
        return workload
    lengths: _Kinds[SequenceOutput] = _Kinds()
    patience: _Kinds[Patience] = _Kinds()
    for request in workload.requests:
        for output in request.outputs:
            lengths.add(request, *_length(request, output), is_known=output.seen_tokens is None)
        patience.add(request, request.waited_ns, request.patience, is_known=request.patience is not None)
    chance = random.Random(f"{seed}")
    lengths.resample(chance)
    patience.resample(chance)
    requests = []
    for index, request in enumerate(workload.requests):
        chance = random.Random(f"{seed}/{index}")
        outputs = [_drawn(request, output, lengths, chance) for output in request.outputs]
        limit = request.patience
        if limit is None and (drawn := patience.draw(request, request.waited_ns, chance)) is not None:
            limit = structs.replace(drawn, s=0)
        requests.append(structs.replace(request, outputs=outputs, patience=limit))
    return structs.replace(workload, requests=requests)


def _value(seen: tuple[int, object]) -> int:
    return seen[0]


def _keys(request: WorkloadRequest) -> Iterator[Hashable]:
    """The kinds that a request belongs to, narrowest first: those of a model, as models answer at different lengths.
    Prompts within a factor of two are similar.
    """
    arrival = request.arrival
    yield arrival.replicaset, arrival.scheduling.service_class, arrival.prompt_tokens.bit_length()
    yield arrival.replicaset, arrival.scheduling.service_class
    yield arrival.replicaset


def _length(request: WorkloadRequest, output: SequenceOutput) -> tuple[int, SequenceOutput | None]:
    """Output tokens, and what ended them: the output itself, or None if that is unknown."""
    if output.seen_tokens is not None:
        return output.seen_tokens, None
    end = _end(output)
    return (end, output) if end < NEVER else (request.arrival.max_tokens, None)


def _end(output: SequenceOutput) -> int:
    return min(output.worker_end, output.text_end.position if output.text_end is not None else NEVER)


def _drawn(
    request: WorkloadRequest, output: SequenceOutput, lengths: _Kinds[SequenceOutput], chance: random.Random
) -> SequenceOutput:
    """The output with a known end. An end in the text becomes one by the worker if the request has no text ends."""
    if output.seen_tokens is None:
        return output
    other = lengths.draw(request, output.seen_tokens, chance)
    output = structs.replace(output, seen_tokens=None)
    if other is None:
        return output
    if (
        request.arrival.scheduling.has_text_ends
        and other.text_end is not None
        and other.text_end.position == _end(other)
    ):
        return structs.replace(output, text_end=structs.replace(other.text_end, s=0))
    delay_ns = other.answer_delay_ns if output.answer_delay_ns is None else output.answer_delay_ns
    return structs.replace(output, worker_end=_end(other), worker_reason=other.worker_reason, answer_delay_ns=delay_ns)
