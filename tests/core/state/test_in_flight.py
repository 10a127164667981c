"""The launches that a snapshot has in flight are those of the log."""

from __future__ import annotations

import random
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.events import Launched
from tests.replay.branch_runs import random_points
from tests.replay.traces import record, small_machine


def launches_of(path: Path) -> dict[int, Launched]:
    with LogReader(path) as log:
        return {event.s: event for line in log if isinstance(event := line.event(), Launched)}


def test_launches_are_as_in_the_log(tmp_path: Path) -> None:
    num_launches = num_rows = num_equal = num_deep = 0
    for seed in (3, 4):
        machine = small_machine({"type": "fcfs"}, max_steps_in_flight=3, max_decodes_in_flight_per_seq=3)
        path = record(tmp_path, machine, seed=seed, run=f"seed-{seed}")
        recorded = launches_of(path)
        for point in random_points(path, 12, random.Random(seed)):
            state = point.state
            live = {request.arrival.s for request in state.requests}
            found = launches_in_flight(state)
            assert [launched.s for launched in found] == sorted(launched.s for launched in found)
            for launched in found:
                there = recorded[launched.s]
                assert (launched.replica, launched.epoch, launched.step) == (there.replica, there.epoch, there.step)
                assert (launched.num_tokens, launched.predicted_ns) == (there.num_tokens, there.predicted_ns)
                assert launched.chunks == there.chunks
                assert [row[:2] for row in launched.decodes] == [row[:2] for row in there.decodes]
                for row, row_there in zip(launched.decodes, there.decodes, strict=True):
                    if row[0] in live and row[2]:
                        # A chunk of the same sequence may have been in flight before it, and has completed since.
                        assert sum(row[2:]) <= sum(row_there[2:])
                        num_equal += sum(row[2:]) == sum(row_there[2:])
                        num_rows += 1
                num_launches += 1
                num_deep += any(row[3] for row in launched.decodes)
    assert num_launches > 20
    assert num_deep > 0
    assert num_equal > 0.9 * num_rows > 20
