"""The request metrics of a log, computed row by row from all its events at once: slow, and plain to see."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from eventlm.events import Arrived, Emitted, Event, Finished, Launched, Preempted, StepCompleted
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore


class Rows:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, int], RequestRow] = {}
        self.steps: list[StepRow] = []
        self.relayed: list[RelayedTokens] = []

    def request_ended(self, row: RequestRow) -> None:
        assert (row.request, row.index) not in self.requests
        self.requests[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        self.steps.append(row)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        self.relayed.append(row)


def fold(events: Sequence[Event]) -> tuple[MetricsStore, Rows]:
    """A store and a sink that have seen the events."""
    rows = Rows()
    store = MetricsStore(sink=rows)
    for event in events:
        store.apply(event)
    return store, rows


def token_times(events: Sequence[Event]) -> dict[tuple[int, int], list[int]]:
    """When each sequence's outputs came (several tokens of one step are one output)."""
    launches = {event.s: event for event in events if isinstance(event, Launched)}
    completions = {event.s: event for event in events if isinstance(event, StepCompleted)}
    times: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Emitted):
            fact = completions[event.c]
            launch = launches[fact.c]
            dropped = dict(event.dropped)
            for index, row in enumerate([*launch.decodes, *launch.chunks]):
                if fact.produced[index] > dropped.get(index, 0):
                    times[row[0], row[1]].append(event.ts)
    return times


def gaps(events: Sequence[Event]) -> Counter[int]:
    """How often each time between two outputs of a sequence occurred."""
    return Counter(later - earlier for times in token_times(events).values() for earlier, later in pairwise(times))


def request_rows(events: Sequence[Event]) -> dict[tuple[int, int], dict[str, Any]]:
    """What can be said of each finished sequence by looking at all events that name it."""
    arrivals = {event.s: event for event in events if isinstance(event, Arrived)}
    times = token_times(events)
    found = {}
    for event in events:
        if not isinstance(event, Finished):
            continue
        identity = (event.request, event.index)
        arrival = arrivals[event.request]
        start_ns = arrival.scheduling.received_ns or arrival.ts
        tokens = times[identity]
        first_launch = next(
            (
                other.ts
                for other in events
                if isinstance(other, Launched) and any(row[:2] == identity for row in other.chunks)
            ),
            None,
        )
        found[identity] = {
            "request_e2e_time": event.ts - start_ns,
            "request_scheduling_delay": None if first_launch is None else first_launch - arrival.ts,
            "prefill_e2e_time": tokens[0] - start_ns if tokens else None,
            "request_decode_time": tokens[-1] - tokens[0] if tokens else None,
            "request_inference_time": tokens[-1] - first_launch if tokens and first_launch is not None else None,
            "request_num_preemptions": sum(
                isinstance(other, Preempted) and (other.request, other.index) == identity for other in events
            ),
            "output_tokens": event.position,
            "prompt_tokens": arrival.prompt_tokens,
            "reason": event.reason,
        }
    return found
