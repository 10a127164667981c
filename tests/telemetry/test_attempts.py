"""Phases and attempts of forwarded sequences from the log alone: those of `explain`, which knows the core's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.replay.explain.explainer import explain
from tests.replay.backend_runs import record_backends
from tests.replay.explained_logs import read
from tests.telemetry.test_phases import check_against_explanations, folded


@pytest.mark.parametrize("seed", range(0, 30, 3))
def test_they_are_those_of_explain(seed: int, tmp_path: Path) -> None:
    path = record_backends(tmp_path, seed, segment_bytes=0 if seed % 5 else 8192)
    check_against_explanations(path)
    expected = {
        (each.request, each.index, attempt.number): (
            *(attempt.replica, attempt.sent_ns, attempt.ended_ns, attempt.end, attempt.status),
            *(attempt.retry_after_ns, attempt.is_hedge, attempt.first_ns),
            # An embedding counts as one here.
            attempt.num_tokens if each.kind == "generate" else int(attempt.first_ns is not None),
        )
        for each in explain(path, read(path).requests).explanations
        for attempt in each.attempts
    }
    found = {
        (each.request, each.index, each.number): (
            *(each.replica, each.sent_ns, each.ended_ns, each.end, each.status, each.retry_after_ns, each.is_hedge),
            *(None if each.first_ns < 0 else each.first_ns, each.total - each.before),
        )
        for each in folded(path).attempts
    }
    assert found == expected
    assert found


def test_a_later_segment_goes_on_with_the_attempts_there(tmp_path: Path) -> None:
    path = record_backends(tmp_path, 15, segment_bytes=8192)
    num_taken_up = 0
    for part in sorted(path.glob("trace*.jsonl")):
        found, start_ns = folded(part), read(part).events[0].ts
        taken_up = [each for each in found.attempts if each.sent_ns == start_ns > 0]
        num_taken_up += len(taken_up)
        for attempt in taken_up:
            phase, begun_ns, _ = found.phases[attempt.request, attempt.index][0]
            assert (phase, begun_ns) == ("decode" if attempt.before else "prefill", start_ns)
    assert num_taken_up > 0
