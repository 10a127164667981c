"""Runs of 200 days, in virtual time: requests are served to the end, and the record can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Arrived, Header
from eventlm.metrics.store import MetricsStore
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from eventlm.types import NANOSECONDS_PER_SECOND
from tests.simulation import Simulation
from tests.workload import Chaos

DAY = 86_400 * NANOSECONDS_PER_SECOND
LAST_DAY = 200


class LongRun(Simulation):
    """A few requests on every tenth day, on workers that live all the time."""

    def _plan_life(self) -> None:
        for worker in self.workers:
            self.at(0, worker.start)
        for day in range(0, LAST_DAY + 1, 10):
            group = [self._make_client(self.machine) for _ in range(3)]
            self.at(day * DAY, lambda group=group: self._arrive(group))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("segment_bytes", [0, 8192])
def test_a_run_of_200_days_serves_everybody_and_verifies(tmp_path: Path, seed: int, segment_bytes: int) -> None:
    writer = LogWriter(real_system(), tmp_path, "run", segment_bytes=segment_bytes)
    outcomes = LongRun(seed, chaos=Chaos(poison_ppm=0), writer=writer).run()
    assert len(outcomes) >= 60
    result = verify(writer.run_folder)
    assert (result.divergence, result.warnings, result.clean_end) == (None, [], True)
    with LogReader(writer.run_folder) as lines:
        events = [line.event() for line in lines]
    assert {event.ts // DAY for event in events if isinstance(event, Arrived)} == set(range(0, LAST_DAY + 1, 10))
    late_segments = [event for event in events if isinstance(event, Header) and event.ts >= 2**53]
    assert bool(late_segments) == bool(segment_bytes)
    store = MetricsStore()
    for event in events:
        store.apply(event)
    assert store.snapshot()
