"""One queue for all replicas."""

from __future__ import annotations

from eventlm.core.plugin import RequestView
from eventlm.policies.pull import Pull
from tests.policies.views import replica


def test_it_leaves_every_request_to_the_first_replica_with_room() -> None:
    assert Pull().route(RequestView(1, 0, 1, 10), [replica(0), replica(1)]) is None
