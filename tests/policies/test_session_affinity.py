"""A session stays where it belongs, unless that is far busier than the least loaded."""

from __future__ import annotations

import time
from collections import Counter

from eventlm.config.core import Forwarding
from eventlm.core.plugin import RequestView, SequenceView
from eventlm.core.routing import UpReplicas
from eventlm.core.state.sequence import Sequence
from eventlm.events import BackendDown
from eventlm.policies.least_loaded import LeastLoaded
from eventlm.policies.session_affinity import SessionAffinity
from tests.core.rig import Rig, arrival
from tests.core.test_forwarding import Backends
from tests.policies.views import replica


def question(session: int) -> RequestView:
    return RequestView(1, 0, 1, 100, session)


def test_a_session_has_one_home_and_sessions_are_spread() -> None:
    router, views = SessionAffinity(), [replica(index) for index in range(4)]
    homes = {session: router.route(question(session), views) for session in range(1, 401)}
    busy = [replica(index, admitted_tokens=1000 * index) for index in range(4)]
    assert homes == {session: router.route(question(session), busy) for session in range(1, 401)}
    assert min(Counter(homes.values()).values()) > 60
    fewer = {session: router.route(question(session), views[:3]) for session in range(1, 401)}
    assert all(fewer[session] == home for session, home in homes.items() if home != 3)


def test_without_a_session_it_is_the_least_loaded() -> None:
    views = [replica(0, waiting_tokens=3), replica(1, admitted_tokens=2), replica(2, admitted_tokens=2)]
    assert SessionAffinity().route(question(0), views) == LeastLoaded().route(question(0), views) == 1


def test_it_spills_over_where_its_home_is_far_busier_than_the_lightest() -> None:
    router = SessionAffinity(spill_tokens=1000)
    home = router.route(question(7), [replica(0), replica(1)])
    assert home is not None
    for more, expected in ((1000, home), (1001, 1 - home)):
        views = [replica(index, admitted_tokens=500) for index in (0, 1)]
        views[home] = replica(home, admitted_tokens=600, waiting_tokens=more - 100)
        assert router.route(question(7), views) == expected


def test_backends_have_sessions_by_their_weights() -> None:
    views = [replica(0, weight_ppm=4_000_000), replica(1)]
    homes = Counter(SessionAffinity().route(question(session), views) for session in range(1, 1001))
    assert 750 < homes[0] < 850


def test_the_sessions_of_a_backend_that_is_gone_come_back_with_it() -> None:
    rig = Backends(3, limit=4, router=SessionAffinity())

    def homes() -> dict[int, int]:
        found = {}
        for session in range(1, 25):
            rig.arrive(session=session)
            [found[session]] = {home for request, _, home in rig.routed() if request == max(rig.state.requests)}
            rig.end(max(rig.state.requests))
        return found

    before = homes()
    assert set(before.values()) == {0, 1, 2}
    assert homes() == before
    rig.feed(BackendDown(replica=1, epoch=1, reason="drained"))
    without = homes()
    assert {session for session, home in before.items() if home != without[session]} == {
        session for session, home in before.items() if home == 1
    }
    rig.feed(rig.up(1, epoch=2, limit=4))
    assert homes() == before


def test_a_thousand_backends_cost_less_than_five_milliseconds() -> None:
    rig = Rig(num_replicas=1000, forwards=Forwarding(), up=False)
    for each in rig.state.replicas:
        each.start_worker(1)
    sequence = Sequence(arrival(), 0, SequenceView.of(arrival(), 0, 0))
    replicas = UpReplicas(rig.state.replicasets[0], sequence)
    began = time.process_time()
    homes = {SessionAffinity().route(question(session), replicas) for session in range(1, 101)}
    assert time.process_time() - began < 0.5
    assert len(homes) > 80
