"""The outcome of a run says the same as its trace's statistics, and measures by objectives and deadlines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.config.objectives import Objectives
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.events import Arrived, Finished, Rejected
from eventlm.metrics.rows import COMPLETED
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.outcome import CANCELLED, OutcomeCollector, RunOutcome
from eventlm.replay.workload.recorded_run import read_run
from tests.replay.branch_runs import random_points, record_random


def outcome_of(path: Path, objectives: Objectives | None = None) -> RunOutcome:
    collector = OutcomeCollector(objectives)
    with LogReader(path) as log:
        for line in log:
            collector.see(line.event())
    return collector.outcome()


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_the_statistics(tmp_path: Path, seed: int) -> None:
    path = record_random(tmp_path, seed)
    stats, found = trace_stats(path), outcome_of(path)
    assert found.num_requests == stats.snapshot.num_requests
    assert found.num_unfinished == 0
    assert found.latency("e2e") == stats.distributions.get("request_e2e_time")
    assert found.latency("tpot") == stats.distributions.get("request_time_per_output_token")
    assert found.latency("queue") == stats.distributions.get("request_scheduling_delay")
    assert sum(found.reject_reasons.values()) == sum(stats.reject_reasons.values())
    assert len(found.sequences) == sum(stats.finish_reasons.values())


def test_objectives(tmp_path: Path) -> None:
    path = record_random(tmp_path, 5)
    assert outcome_of(path).objectives_met_ppm is None
    assert outcome_of(path).fluidity_ppm is None
    assert outcome_of(path, Objectives(ttft=1e6, tpot=1e6)).fluidity_ppm == 1_000_000
    assert outcome_of(path, Objectives(ttft=1e-6, tpot=1e-6)).fluidity_ppm == 0
    shares = [outcome_of(path, Objectives(e2e=limit)).objectives_met_ppm for limit in (1, 50, 100, 1e6)]
    assert None not in shares
    assert shares == sorted(shares, key=lambda share: share or 0)


def test_own_deadlines(tmp_path: Path) -> None:
    """Against a plain reading of the trace: the first token's emission, or a finish without one."""
    met = [found.met_deadline for seed in range(6) for found in outcome_of(record_random(tmp_path, seed)).sequences]
    assert True in met
    assert False in met
    assert None in met


@pytest.mark.parametrize("seed", range(6))
def test_who_is_rejected_misses_its_deadline_and_the_objectives(tmp_path: Path, seed: int) -> None:
    """Against a plain count: an engine is not better for what it does not serve."""
    path = record_random(tmp_path, seed)
    with LogReader(path) as log:
        events = [line.event() for line in log]
    arrivals = {event.s: event for event in events if isinstance(event, Arrived)}
    refused = [arrivals[event.request] for event in events if isinstance(event, Rejected)]
    reasons = [event.reason for event in events if isinstance(event, Finished)]
    found = outcome_of(path, Objectives(e2e=1e9))
    num_done = sum(reason in COMPLETED for reason in reasons)
    # Who leaves before the first token has not met anything; who leaves later is judged by what it got.
    num_left = sum(each.reason in CANCELLED and each.ttft_ns is not None for each in found.sequences)
    # Objectives that a request brings beat those given, and here nobody brings any.
    assert not any(arrival.scheduling.slo_ttft_ns or arrival.scheduling.slo_tpot_ns for arrival in arrivals.values())
    num_counted = len(reasons) + sum(arrival.n for arrival in refused)
    assert found.objectives_met_ppm == (num_done + num_left) * 1_000_000 // num_counted
    answers = [each.met_deadline for each in found.sequences if each.met_deadline is not None]
    num_due = len(answers) + sum(arrival.n for arrival in refused if arrival.scheduling.deadline_ns)
    assert found.deadlines_met_ppm == (sum(answers) * 1_000_000 // num_due if num_due else None)


def test_the_rest_of_a_run_is_measured_with_what_was_live(tmp_path: Path) -> None:
    path = record_random(tmp_path, 4)
    run = read_run(path)
    whole = {(each.request, each.index): each for each in outcome_of(path).sequences}
    num_begun = 0
    for point in random_points(path, 8, random.Random(1)):
        collector = OutcomeCollector()
        state = point.state
        collector.take_up(run.header, state, launches_in_flight(state))
        with LogReader(path) as log:
            for line in log.lines_from(point.s + 1):
                collector.see(line.event())
        found = collector.outcome()
        begun = {
            (request.arrival.s, row.index)
            for request in state.requests
            for row in request.sequences
            if row.num_tokens > request.arrival.prompt_tokens
        }
        assert {(each.request, each.index) for each in found.sequences} == {
            name for name, each in whole.items() if each.ended_ns > point.now_ns
        }
        for each in found.sequences:
            before = whole[each.request, each.index]
            assert (each.e2e_ns, each.output_tokens, each.reason) == (
                before.e2e_ns,
                before.output_tokens,
                before.reason,
            )
            is_begun = (each.request, each.index) in begun
            assert each.ttft_ns == (None if is_begun else before.ttft_ns)
            assert each.met_deadline == (None if is_begun else before.met_deadline)
            assert each.num_preemptions <= before.num_preemptions
        num_begun += len(begun)
        assert found.num_unfinished == 0
        assert found.output_tokens <= sum(each.output_tokens for each in whole.values())
    assert num_begun > 0
