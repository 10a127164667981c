"""Deadlines of tokens, and the times of tokens against the log read in the plain way."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Emitted, Finished, Launched, Relayed, StepCompleted, Streamed
from eventlm.replay.fluidity import TokenArrivals, tokens_in_time
from eventlm.system.system import real_system
from tests.simulation import Simulation


@pytest.mark.parametrize(
    ("times_ns", "num_met"),
    [
        ([], 0),
        ([100, 110, 120], 3),
        ([101, 111, 121], 2),  # the first is late, the others are not late behind it
        ([50, 110, 120], 3),
        ([50, 111, 120], 2),  # a token that came early lets the next take its time, to the nanosecond
        ([100, 500, 510, 520], 3),  # one stall is one miss
    ],
)
def test_deadlines(times_ns: list[int], num_met: int) -> None:
    assert tokens_in_time(times_ns, start_ns=0, ttft_ns=100, tpot_ns=10) == num_met


@pytest.mark.parametrize("seed", range(12))
def test_times_of_tokens(tmp_path: Path, seed: int) -> None:
    """Random workloads with preemptions, lost workers and cut texts; each emission is told again row by row."""
    with LogWriter(real_system(), tmp_path, "run") as writer:
        Simulation(seed, writer=writer, check_every=0).run()
        path = writer.run_folder
    times, plain = TokenArrivals(), dict[tuple[int, int], list[int]]()
    launches: dict[int, Launched] = {}
    completed: StepCompleted | None = None
    num_compared = 0
    with LogReader(path) as log:
        for line in log:
            event = line.event()
            if isinstance(event, Launched):
                launches[event.s] = event
            elif isinstance(event, StepCompleted):
                completed = event
            elif isinstance(event, Emitted):
                assert completed is not None
                launched, dropped = launches[completed.c], dict(event.dropped)
                rows = [*launched.decodes, *launched.chunks]
                for row, produced in enumerate(completed.produced):
                    tokens = plain.setdefault((rows[row][0], rows[row][1]), [])
                    tokens += [event.ts] * (produced - dropped.get(row, 0))
            elif isinstance(event, Finished):
                expected = plain.get((event.request, event.index), [])[: event.position]
                if log.header.core.max_tokens_per_row == 1:
                    assert times.take(event) == expected
                    num_compared += 1
            times.see(event)
    assert num_compared or log.header.core.max_tokens_per_row > 1


def test_tokens_of_other_servers_have_the_times_at_which_they_were_relayed() -> None:
    arrivals = TokenArrivals()
    for ts, total, dropped in ((10, 1, []), (20, 4, []), (30, 5, [0])):
        arrivals.see(Streamed(ts=ts, rows=[(3, 0, 1, total)]))
        arrivals.see(Relayed(ts=ts, num_tokens=1, dropped=dropped))
    assert arrivals.take(Finished(ts=40, request=3, index=0, reason="stop", position=5)) == [10, 20, 20, 20, 40]
