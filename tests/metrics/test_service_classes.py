"""Sums by service class, against the rows of random workloads, and bounds on what a trace can name."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Arrived, Rejected
from eventlm.metrics.rows import CANCELLED
from eventlm.metrics.service_classes import MAX_CLASSES, ClassSums
from tests.core.rig import arrival
from tests.engine.metrics_oracle import fold
from tests.simulation import Simulation


@pytest.mark.parametrize("seed", [3, 4])
def test_sums_are_those_of_the_rows(tmp_path: Path, seed: int) -> None:
    writer = LogWriter(tmp_path, "run")
    Simulation(seed, num_requests=40, writer=writer).run()
    with LogReader(writer.path) as reader:
        events = [line.event() for line in reader]
    store, rows = fold(events)
    arrivals = {event.s: event for event in events if isinstance(event, Arrived)}
    rejected = [arrivals[event.request].scheduling.service_class for event in events if isinstance(event, Rejected)]
    classes = store.snapshot().classes
    names = {event.scheduling.service_class for event in arrivals.values()} - {""}
    assert names
    assert list(classes) == sorted(names)
    for name, sums in classes.items():
        of_class = [row for row in rows.requests.values() if row.service_class == name]
        asked = [row for row in of_class if row.met_slo is not None and row.reason not in CANCELLED]
        assert sums.num_requests == sum(each.scheduling.service_class == name for each in arrivals.values())
        assert sum(sums.reject_reasons.values()) == rejected.count(name)
        assert sums.num_complete == sums.e2e.num_values == sum(row.is_complete for row in of_class)
        assert sums.num_dropped == sum(row.reason == "deadline" for row in of_class)
        assert sums.num_deadlines_met == sum(row.met_deadline is True for row in of_class)
        assert sums.num_deadlines_missed == sum(row.met_deadline is False for row in of_class)
        assert sums.num_slo_met == sum(bool(row.met_slo) and row.is_complete for row in asked)
        assert sums.num_slo_met + sums.num_slo_missed == len(asked)
        assert sums.ttft.num_values == sum(row.prefill_e2e_time is not None for row in of_class)
        assert sums.output_tokens == sum(row.output_tokens for row in of_class)


def test_a_trace_cannot_name_classes_without_end() -> None:
    sums = ClassSums()
    for number in range(MAX_CLASSES + 10):
        sums.arrived(arrival(service_class=f"class{number}"))
    found = sums.snapshot()
    assert len(found) == MAX_CLASSES + 1
    assert found["(others)"].num_requests == 10
