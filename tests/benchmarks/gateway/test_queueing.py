"""Urgent requests in the gateway's queue and in llama.cpp's: the load, and the comparison within a round."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.gateway.queueing import LONG, MIX, OWN_QUEUE, SHORT, Measured, draw, rows


def test_arrivals_and_prompts_are_the_same_for_every_way() -> None:
    requests = draw(40, 5.0, seed=1)
    assert requests == draw(40, 5.0, seed=1)
    assert requests != draw(40, 5.0, seed=2)
    times = [request.arrival_ns or 0 for request in requests]
    assert all(before < after for before, after in pairwise(times))
    assert times[-1] / 1e9 == pytest.approx(8, rel=0.5)
    for request in requests:
        kind = MIX[request.index % len(MIX)]
        assert len(request.body["prompt"]) == request.prompt_tokens == kind.prompt_tokens
        assert request.body["deadline_ms"] == kind.deadline_ms
    assert SHORT.deadline_ms < LONG.deadline_ms
    assert {request.arrival_ns for request in draw(4, 0.0, seed=1)} == {0}


def test_ratios_are_within_a_round() -> None:
    found = [
        {OWN_QUEUE: Measured(900, 1000, 0.1, 1500, 50), "edf": Measured(100, 200, 0.9, 2000, 49)},
        {"edf": Measured(100, 400, 0.8, 2200, 102), OWN_QUEUE: Measured(900, 4000, 0.2, 3000, 100)},
    ]
    own, edf = rows(found)
    assert own == (OWN_QUEUE, "900", "2,500", "1.00", "15%", "2,250", "75.0", "1.000")
    assert edf == ("edf", "100", "300", "0.15", "85%", "2,100", "75.5", "1.000")
