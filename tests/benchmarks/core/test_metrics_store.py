"""The benchmark of the metrics' cost: it has the events of the steps that it times."""

from __future__ import annotations

from benchmarks.core.metrics_store import record_steps, scrape, step_times
from eventlm.events import StepCompleted


async def test_steps_and_scrapes_are_timed() -> None:
    events, first, core_us = record_steps(3, 5)
    assert sum(isinstance(event, StepCompleted) for event in events[first:]) == 5
    assert len(step_times(events, first)) == 5
    assert core_us > 0
    wall_ms, pause_ms, num_bytes = await scrape(2, "")
    assert pause_ms > 0
    assert wall_ms > 0
    assert num_bytes > 1000
