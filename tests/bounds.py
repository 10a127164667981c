"""Watches a run's events for what must never happen: too many evictions, and preemptions that nobody gains by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from eventlm.config import CoreConfig
from eventlm.events import Arrived, Emitted, Event, Finished, Launched, PolicySwapped, Preempted, StepCompleted

Row = tuple[int, int]

#: Policies without a margin on their keys.
NEVER_EVICT = ("fcfs", "lpm")


class EvictionBounds:
    """Counts along; `watch` raises AssertionError at the event that breaks a bound.

    Evictions at admission: at most `max_evictions` of a sequence between two of its tokens, so at most
    `max_evictions` x (its tokens + 1) in all; and with fcfs and lpm as the only policies so far, none within one
    priority.
    Memory: who has residents preempted gets at least as many blocks in the step being formed, or is preempted itself.
    """

    def __init__(self, sets: Sequence[tuple[CoreConfig, list[dict[str, Any]]]]) -> None:
        # Of several replicasets, what each of them keeps to.
        self._max_evictions = max(config.max_evictions for config, _ in sets)
        self._never_evicts = all(policies[0]["type"] in NEVER_EVICT for _, policies in sets)
        self._priorities: dict[int, int] = {}
        self._evictions: Counter[Row] = Counter()
        self._rows: dict[tuple[int, int, int], list[Row]] = {}
        self._completed: tuple[list[Row], list[int]] = ([], [])
        #: Victims of the step being formed, by (replica, who asked).
        self._asked: Counter[tuple[int, Row]] = Counter()

    def watch(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Arrived():
                self._priorities[event.s] = event.scheduling.priority
            case PolicySwapped():
                self._never_evicts = self._never_evicts and event.name in NEVER_EVICT
            case Preempted():
                self._preempted(event)
            case Launched():
                self._launched(event)
            case StepCompleted():
                rows = self._rows.pop((event.replica, event.epoch, event.step), [])
                self._completed = (rows, event.produced)
            case Emitted():
                dropped = dict(event.dropped)
                for index, (row, count) in enumerate(zip(*self._completed, strict=True)):
                    if count and index not in dropped:
                        self._evictions.pop(row, None)
            case Finished():
                self._evictions.pop((event.request, event.index), None)

    def _preempted(self, event: Preempted) -> None:
        victim = (event.request, event.index)
        if event.reason == "admission":
            assert event.by is not None
            self._evictions[victim] += 1
            assert self._evictions[victim] <= self._max_evictions, f"event {event.s} is an eviction too many"
            if self._never_evicts:
                assert self._priorities[event.by[0]] < self._priorities[victim[0]], "a policy without a margin evicted"
        elif event.reason == "memory" and event.by is not None:
            self._asked[(event.replica, event.by)] += 1
        elif event.reason == "memory":
            self._asked.pop((event.replica, victim), None)

    def _launched(self, event: Launched) -> None:
        rows = [(row[0], row[1]) for row in [*event.decodes, *event.chunks]]
        self._rows[(event.replica, event.epoch, event.step)] = rows
        granted = {rows[row]: len(blocks) for row, _, blocks in event.blocks}
        for (replica, asker), num_victims in list(self._asked.items()):
            if replica == event.replica:
                assert num_victims <= granted.get(asker, 0), f"event {event.s}: {asker} gained less than it took"
                del self._asked[(replica, asker)]
