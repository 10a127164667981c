"""Sums by service class, against the rows of random workloads, and bounds on what a trace can name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Arrived, Rejected
from eventlm.metrics.rows import CANCELLED, RequestRow
from eventlm.metrics.service_classes import MAX_CLASSES, ClassSums
from eventlm.system.system import real_system
from tests.core.rig import arrival
from tests.engine.metrics_oracle import fold
from tests.simulation import Simulation


@pytest.mark.parametrize("seed", [3, 4])
def test_sums_are_those_of_the_rows(tmp_path: Path, seed: int) -> None:
    writer = LogWriter(real_system(), tmp_path, "run")
    Simulation(seed, num_requests=40, writer=writer).run()
    with LogReader(writer.path) as reader:
        events = [line.event() for line in reader]
    store, rows = fold(events)
    arrivals = {event.s: event for event in events if isinstance(event, Arrived)}
    rejected = [arrivals[event.request] for event in events if isinstance(event, Rejected)]
    classes = store.snapshot().classes
    names = {event.scheduling.service_class for event in arrivals.values()} - {""}
    assert names
    assert list(classes) == sorted(names)
    for name, sums in classes.items():
        of_class = [row for row in rows.requests.values() if row.service_class == name]
        asked = [row for row in of_class if row.met_slo is not None]
        refused = [each for each in rejected if each.scheduling.service_class == name]
        refused_due = sum(each.n for each in refused if each.scheduling.deadline_ns)
        refused_asked = sum(each.n for each in refused if each.scheduling.slo_ttft_ns or each.scheduling.slo_tpot_ns)
        assert sums.num_requests == sum(each.scheduling.service_class == name for each in arrivals.values())
        assert sum(sums.reject_reasons.values()) == len(refused)
        assert sums.num_complete == sum(sums.e2e.counts) == sum(row.is_complete for row in of_class)
        assert sums.num_dropped == sum(row.reason == "deadline" for row in of_class)
        assert sums.num_deadlines_met == sum(row.met_deadline is True for row in of_class)
        assert sums.num_deadlines_missed == refused_due + sum(row.met_deadline is False for row in of_class)
        met = [row for row in asked if row.met_slo and (row.is_complete or row.reason in CANCELLED)]
        assert sums.num_slo_met == sum(row.is_complete or row.prefill_e2e_time is not None for row in met)
        assert sums.num_slo_met + sums.num_slo_missed == len(asked) + refused_asked
        assert sum(sums.ttft.counts) == sum(row.prefill_e2e_time is not None for row in of_class)
        assert sums.output_tokens == sum(row.output_tokens for row in of_class)


def test_a_trace_cannot_name_classes_without_end() -> None:
    sums = ClassSums()
    for number in range(MAX_CLASSES + 10):
        sums.arrived(arrival(service_class=f"class{number}"))
    found = sums.snapshot()
    assert len(found) == MAX_CLASSES + 1
    assert found["(others)"].num_requests == 10


def row(reason: str, **values: Any) -> RequestRow:
    return msgspec.convert(
        {name: 0 for name in RequestRow.__struct_fields__ if name.endswith(("_ns", "_tokens"))}
        | {"request": 1, "index": 0, "replica": 0, "reason": reason, "request_e2e_time": 9, "service_class": "gold"}
        | values,
        RequestRow,
    )


def test_who_is_not_served_counts_as_missed() -> None:
    """As in what-if: an engine does not do better by rejecting requests, or by keeping them until they leave."""
    sums = ClassSums()
    asked = arrival(service_class="gold", n=3, slo_ttft_ns=5, deadline_ns=5).scheduling
    sums.rejected(asked, 3, "queue_full")
    sums.rejected(arrival(service_class="gold").scheduling, 1, "queue_full")
    found = sums.snapshot()["gold"]
    assert (found.num_slo_met, found.num_slo_missed, found.num_deadlines_missed) == (0, 3, 3)
    assert found.reject_reasons == {"queue_full": 2}
    for reason, first_ns, met_slo in (
        ("cancelled", None, False),
        ("cancelled", 3, True),
        ("cancelled", 7, False),
        ("deadline", 3, True),
        ("eos", 3, True),
        ("eos", 3, None),
    ):
        sums.ended(row(reason, prefill_e2e_time=first_ns, met_slo=met_slo))
    found = sums.snapshot()["gold"]
    assert (found.num_slo_met, found.num_slo_missed) == (2, 6)
