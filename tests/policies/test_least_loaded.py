"""The replica with the least to do."""

from __future__ import annotations

from eventlm.core.plugin import RequestView
from eventlm.policies.least_loaded import LeastLoaded
from tests.policies.views import replica

QUESTION = RequestView(1, 0, 1, 10)


def test_admitted_and_waiting_tokens_count_alike() -> None:
    busy, lined_up, idle = replica(0, admitted_tokens=50), replica(1, waiting_tokens=49), replica(2, num_waiting=99)
    assert LeastLoaded().route(QUESTION, [busy, lined_up, idle]) == 2
    assert LeastLoaded().route(QUESTION, [busy, lined_up]) == 1


def test_ties_go_to_the_lower_index() -> None:
    assert LeastLoaded().route(QUESTION, [replica(2), replica(1)]) == 1
