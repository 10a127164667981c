"""Replicas in turn."""

from __future__ import annotations

from collections import Counter

from eventlm.core.plugin import RequestView
from eventlm.policies.round_robin import RoundRobin
from tests.policies.views import replica


def test_requests_take_turns_whatever_they_are() -> None:
    replicas = [replica(0, admitted_tokens=9999), replica(1), replica(2)]
    homes = [RoundRobin().route(RequestView(s * 7, s, 1 + s % 3, 10), replicas) for s in range(9)]
    assert homes == [0, 1, 2] * 3


def test_only_replicas_that_are_up_are_chosen() -> None:
    replicas = [replica(0), replica(3)]
    homes = Counter(RoundRobin().route(RequestView(s, s, 1, 10), replicas) for s in range(10))
    assert homes == {0: 5, 3: 5}
