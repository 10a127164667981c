"""What counts as foretold: within the target or the reruns' spread, and the winner of a real difference."""

from __future__ import annotations

from benchmarks.what_if.fidelity import Row, winners


def rows(predicted: dict[str, float], reruns: dict[str, list[float]]) -> list[Row]:
    """One metric of some policies; the others are alike."""
    found = [Row(policy, "ttft p50", value, reruns[policy]) for policy, value in predicted.items()]
    others = ("ttft p99", "tpot p50", "tpot p99")
    return found + [Row(policy, metric, 1.0, [1.0]) for policy in predicted for metric in others]


def test_a_prediction_may_be_off_by_the_target_or_the_spread() -> None:
    assert Row("edf", "m", 106.0, [99.0, 100.0, 101.0]).is_within
    assert not Row("edf", "m", 108.0, [99.0, 100.0, 101.0]).is_within
    assert Row("edf", "m", 88.0, [95.0, 100.0, 107.0]).is_within
    assert not Row("edf", "m", 87.0, [95.0, 100.0, 107.0]).is_within


def test_only_real_differences_have_a_winner() -> None:
    reruns = {"fcfs": [100.0, 110.0, 120.0], "edf": [130.0, 131.0, 140.0], "lrs": [101.0, 112.0, 118.0]}
    # fcfs and lrs are too near each other.
    assert winners(rows({"fcfs": 1.0, "edf": 2.0, "lrs": 1.5}, reruns)) == (2, 2, [])
    wrong = ["ttft p50: fcfs against edf"]
    assert winners(rows({"fcfs": 3.0, "edf": 2.0, "lrs": 1.5}, reruns)) == (2, 1, wrong)
    # By the medians these differ, but not in all reruns.
    crossed = {"fcfs": [100.0, 110.0, 150.0], "edf": [130.0, 131.0, 140.0]}
    assert winners(rows({"fcfs": 1.0, "edf": 2.0}, crossed)) == (0, 0, [])
