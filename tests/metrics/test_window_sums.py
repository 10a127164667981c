"""A window of a trace: the requests that arrived in it, and the steps that overlap it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.types import TimeWindow
from tests.replay.golden import FOLDER, GOLDEN


class Rows:
    def __init__(self, path: Path) -> None:
        self.requests: list[RequestRow] = []
        self.steps: list[StepRow] = []
        store = MetricsStore(sink=self)
        with LogReader(path) as reader:
            self.events = [line.event() for line in reader]
        for event in self.events:
            store.apply(event)

    def request_ended(self, row: RequestRow) -> None:
        self.requests.append(row)

    def step_completed(self, row: StepRow) -> None:
        self.steps.append(row)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """There are none."""


@pytest.mark.parametrize("name", GOLDEN)
def test_a_window_of_everything_is_the_whole(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    whole = trace_stats(path)
    for window in (TimeWindow(0, None), TimeWindow(0, 10**18)):
        found = trace_stats(path, window=window)
        assert found.distributions == whole.distributions
        assert found.snapshot.num_events == whole.snapshot.num_events
        assert found.snapshot.duration_ns == whole.snapshot.duration_ns
        assert found.snapshot.num_requests == whole.snapshot.num_requests
        assert found.snapshot.classes == whole.snapshot.classes
        for mine, its in zip(found.snapshot.replicas, whole.snapshot.replicas, strict=True):
            for field in (
                "num_steps", "busy_ns", "generation_tokens", "prompt_tokens", "cached_tokens", "hit_tokens",
                "queried_tokens", "finish_reasons", "preempt_reasons", "reject_reasons", "num_workers_lost",
                "num_deadlines_met", "num_deadlines_missed", "num_running", "num_held_blocks",
            ):  # fmt: skip
                assert getattr(mine, field) == getattr(its, field), field


@pytest.mark.parametrize("name", GOLDEN)
def test_parts_of_a_run_have_what_arrived_and_ran_in_them(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    rows = Rows(path)
    end_ns = rows.events[-1].ts
    cuts = [0, end_ns // 3, end_ns // 2, end_ns + 1]
    parts = [TimeWindow(low, high) for low, high in pairwise(cuts)]
    stats = [trace_stats(path, window=window) for window in parts]
    for window, found in zip(parts, stats, strict=True):
        arrived = [event for event in rows.events if isinstance(event, Arrived) and window.has(event.ts)]
        assert found.snapshot.num_requests == len(arrived)
        ended = [row for row in rows.requests if window.has(row.arrived_ns)]
        assert sum(found.finish_reasons.values()) == len(ended)
        steps = [step for step in rows.steps if window.overlaps(step.started_ns, step.completed_ns)]
        assert sum(replica.num_steps for replica in found.snapshot.replicas) == len(steps)
        tokens = sum(replica.generation_tokens for replica in found.snapshot.replicas)
        assert tokens == sum(len(step.tokens) for step in steps)
        assert found.begin_ns == window.from_ns
        assert found.snapshot.num_events == sum(window.has(event.ts) for event in rows.events)
    # Nothing that happens at one moment is in two of them, or in none.
    whole = trace_stats(path).snapshot
    for field in ("hit_tokens", "queried_tokens", "prompt_tokens", "num_workers_lost"):
        total = sum(getattr(replica, field) for found in stats for replica in found.snapshot.replicas)
        assert total == sum(getattr(replica, field) for replica in whole.replicas), field


def test_a_window_in_which_nothing_happened() -> None:
    found = trace_stats(FOLDER / "edf_tight.jsonl", window=TimeWindow(10**15, None))
    assert found.snapshot.num_requests == found.snapshot.num_events == found.snapshot.duration_ns == 0
    assert found.distributions == {}
    assert all(replica.num_steps == replica.hit_tokens == 0 for replica in found.snapshot.replicas)
