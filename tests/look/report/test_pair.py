"""Two runs in a report, against `eventlm trace diff`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eventlm.look.report.pair import compare
from eventlm.replay.diff.diff import diff, read_side


def test_latencies_side_by_side(planted_run: Callable[[str], Path]) -> None:
    path, other = (str(planted_run(name)) for name in ("one_sided_router", "cache_hostile_router"))
    found, expected = compare(path, other), diff(read_side(path), read_side(other))
    assert (found["numPairs"], found["onlyA"], found["onlyB"]) == (expected.num_pairs, 0, 0)
    for metric, each in zip(found["metrics"], expected.metrics, strict=True):
        assert (metric["metric"], metric["a"]["p99"], metric["delta"]["p50"]) == (
            each.metric,
            each.a.p99,
            each.delta.p50,
        )
    deltas = [abs(b - a) for a, b in (row["values"]["e2e"] for row in found["largest"]["e2e"])]
    assert deltas == sorted(deltas, reverse=True)
    assert "core.num_replicas" in {row["name"] for row in found["header"]}
    assert found["first"]
    assert not found["isIdentical"]


def test_a_run_and_itself(planted_run: Callable[[str], Path]) -> None:
    path = str(planted_run("starving_key"))
    found = compare(path, path)
    assert found["isIdentical"]
    assert found["largest"]["ttft"] == []
