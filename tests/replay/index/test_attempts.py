"""Attempts to have other servers answer: the table has those that `explain` finds, and requests what was measured."""

from __future__ import annotations

from pathlib import Path

from eventlm.replay.explain.explainer import explain
from eventlm.replay.index.open import open_index
from eventlm.replay.index.tables import MarkKind
from tests.replay.backend_runs import record_backends
from tests.replay.explained_logs import read

SEEDS = range(16)
#: Ends that are no failures.
OK = ("answered", "withdrawn", "cut", "lost")


def test_attempts_are_those_that_are_explained(tmp_path: Path) -> None:
    num_attempts = 0
    for seed in SEEDS:
        path = record_backends(tmp_path, seed, segment_bytes=0 if seed % 5 else 8192)
        index, log = open_index(str(path)), read(path)
        expected = {
            (each.request, each.index, attempt.number): (
                *(attempt.replica, attempt.sent_ns, attempt.ended_ns, attempt.end, attempt.status, attempt.is_hedge),
                *(-1 if ns is None else ns for ns in (attempt.first_ns, attempt.retry_ns)),
                attempt.num_tokens,
            )
            for each in explain(path, log.requests).explanations
            for attempt in each.attempts
        }
        requests = index.requests
        found = {}
        for row in index.attempts.rows():
            identity = (int(requests["request"][row["row"]]), int(requests["index"][row["row"]]), row["attempt"])
            found[identity] = (
                *(row["replica"], row["sent_ns"], row["ended_ns"], index.name(row["end"]), row["status"]),
                *(bool(row["is_hedge"]), row["first_ns"], row["retry_ns"], row["total"] - row["before"]),
            )
        assert found == expected, seed
        num_attempts += len(found)
        num_failed = index.marks["kind"].tolist().count(MarkKind.FORWARD_FAILED)
        assert num_failed == sum(each[3] not in OK for each in found.values())
    assert num_attempts > 200


def test_requests_have_what_was_measured(tmp_path: Path) -> None:
    num_forwarded = 0
    for seed in SEEDS:
        path = record_backends(tmp_path, seed)
        rows = read(path).rows
        for row in open_index(str(path)).requests.rows():
            measured = rows.get((row["request"], row["index"]))
            if measured is None:
                continue
            num_forwarded += 1
            delays = (measured.prefill_e2e_time, measured.request_scheduling_delay)
            starts = (row["first_token_ns"] - row["received_ns"], row["launched_ns"] - row["arrived_ns"])
            for delay, start in zip(delays, starts, strict=True):
                assert start == delay if delay is not None else start < 0
            assert (row["output_tokens"], row["ended_ns"]) == (measured.output_tokens, measured.finished_ns)
            if measured.request_time_per_output_token is not None:
                span_ns = row["last_token_ns"] - row["first_token_ns"]
                assert span_ns // (row["output_tokens"] - 1) == measured.request_time_per_output_token
    assert num_forwarded > 200
