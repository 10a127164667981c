"""Forwarded requests: every nanosecond of each has one cause, and attempts are where the log has them."""

from __future__ import annotations

from collections import Counter

import pytest

from eventlm.events import Arrived, BackendUp, Finished, Forwarded, ForwardFailed, Recovered
from eventlm.metrics.rows import RequestRow
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.result import Explanation
from eventlm.replay.explain.story import describe
from tests.replay.backend_runs import record_backends
from tests.replay.explained_logs import Log, check_sums, read

NUM_RUNS = 30
CAUSES = ("first_token", "streaming", "failed_attempt", "outrun", "cut_attempt", "engine_down")
CAUSES += ("backend_limit", "backend", "backoff", "avoided", "paused")


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Log, list[Explanation]]]:
    """Random runs; one in five in many files."""
    folder = tmp_path_factory.mktemp("forwarded")
    logs = [read(record_backends(folder, seed, segment_bytes=0 if seed % 5 else 8192)) for seed in range(NUM_RUNS)]
    return [(log, explain(log.path, log.requests).explanations) for log in logs]


def test_every_nanosecond_has_one_cause(explained: list[tuple[Log, list[Explanation]]]) -> None:
    causes: Counter[str] = Counter()
    for log, explanations in explained:
        for explanation in explanations:
            check_sums(explanation)
            assert all(paragraph.endswith(".") for paragraph in describe(explanation))
            row = log.rows.get((explanation.request, explanation.index))
            if explanation.is_forwarded and row is not None:
                _check_against_metrics(explanation, row)
                causes.update({interval.cause for interval in explanation.intervals})
    assert causes.keys() >= set(CAUSES)


def _check_against_metrics(explanation: Explanation, row: RequestRow) -> None:
    """What the metrics store measured of the same log, by itself."""
    phases: Counter[str] = Counter()
    for interval in explanation.intervals:
        phases[interval.phase] += interval.duration_ns
    first_ns = explanation.first_token_ns
    assert explanation.total_ns == row.request_e2e_time
    assert (None if first_ns is None else first_ns - explanation.start_ns) == row.prefill_e2e_time
    assert (explanation.outcome, explanation.output_tokens) == (row.reason, row.output_tokens)
    if row.request_scheduling_delay is None:
        assert not explanation.attempts
        return
    assert phases["queue"] == row.request_scheduling_delay
    assert phases["retry"] == row.request_preemption_time
    assert phases["prefill"] + phases["decode"] == row.request_execution_time


def test_attempts_are_those_of_the_log(explained: list[tuple[Log, list[Explanation]]]) -> None:
    num_failed = num_lost = 0
    for log, explanations in explained:
        names = {event.replica: event.name for event in log.events if isinstance(event, BackendUp)}
        sent = {
            (event.request, event.index, event.attempt): (event.ts, event.replica, event.hedge)
            for event in log.events
            if isinstance(event, Forwarded)
        }
        failed = {
            (event.request, event.index, event.attempt): (event.ts, event.kind)
            for event in log.events
            if isinstance(event, ForwardFailed)
        }
        lost_ns = {event.ts for event in log.events if isinstance(event, Recovered)}
        found = {}
        for explanation in explanations:
            for attempt in explanation.attempts:
                identity = (explanation.request, explanation.index, attempt.number)
                found[identity] = (attempt.sent_ns, attempt.replica, attempt.is_hedge)
                assert attempt.backend == names[attempt.replica]
                if attempt.end in ("answered", "withdrawn", "cut"):
                    assert failed.get(identity, (attempt.ended_ns,))[0] >= attempt.ended_ns
                elif attempt.end == "lost":
                    num_lost += 1
                    assert attempt.ended_ns in lost_ns
                else:
                    num_failed += 1
                    assert failed[identity] == (attempt.ended_ns, attempt.end)
            ends = [attempt.end for attempt in explanation.attempts]
            assert ends.count("answered") == (explanation.outcome in ("stop", "length", "complete") and bool(ends))
            if explanation.is_forwarded and explanation.kind == "generate":
                assert sum(attempt.num_tokens for attempt in explanation.attempts) == explanation.output_tokens
        assert found == sent
    assert num_failed > 50
    assert num_lost > 10


def test_a_later_segment_explains_its_part(explained: list[tuple[Log, list[Explanation]]]) -> None:
    num_resumed = 0
    for log, _ in explained[::5]:
        for part in sorted(log.path.glob("trace*.jsonl")):
            events = read(part).events
            wanted = {event.request for event in events if isinstance(event, Finished)}
            arrived = {event.s for event in events if isinstance(event, Arrived)}
            for explanation in explain(part, [(request, None) for request in sorted(wanted)]).explanations:
                check_sums(explanation)
                if explanation.is_forwarded and explanation.request not in arrived:
                    num_resumed += 1
                    assert explanation.notes == ["its arrival is not in the log"]
                    assert {interval.cause for interval in explanation.intervals} <= {*CAUSES, "not_recorded"}
    assert num_resumed > 5
