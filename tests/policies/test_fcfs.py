"""First come, first served."""

from __future__ import annotations

from eventlm.policies.fcfs import Fcfs
from tests.policies.views import view


def test_keys_are_the_arrivals_whatever_the_time() -> None:
    views = [view(arrival_ns=7), view(arrival_ns=3, deadline_ns=1), view(arrival_ns=2**52 + 1)]
    assert Fcfs().keys(views, 0) == Fcfs().keys(views, 2**53 - 1) == [7, 3, 2**52 + 1]


def test_it_is_asked_once_and_never_evicts() -> None:
    assert Fcfs.static is True
    assert Fcfs().eviction_margin() is None
