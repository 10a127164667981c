"""Places in line, and by which key behind whom."""

from __future__ import annotations

from eventlm.policies.edf import Edf
from eventlm.policies.lrs import Lrs
from eventlm.policies.round_robin import RoundRobin
from eventlm.replay.why.place import find_place, line_of
from tests.core.rig import MILLISECOND, Rig, arrival


def test_first_last_and_between() -> None:
    rig = Rig(max_num_seqs=1)
    rig.arrive(4, 8, priority=-2)
    one, two, three = rig.arrive_all(arrival(), arrival(priority=-1), arrival())
    rig.complete()
    replica = rig.state.replicas[0]
    found = {request: find_place(rig.state, rig.sequence(request), replica) for request in (one, two, three)}
    assert {request: (place.place, place.total) for request, place in found.items() if place} == {
        two: (1, 3),
        one: (2, 3),
        three: (3, 3),
    }
    last = found[three]
    assert last is not None
    assert last.ahead is not None
    assert last.head is not None
    assert (last.ahead.other, last.head.other) == ((one, 0), (two, 0))
    assert (last.head.other_urgency[0], last.head.own_urgency[0]) == (-1, 0)
    first = found[two]
    assert first is not None
    assert (first.ahead, first.head) == (None, None)


def test_the_line_is_that_of_the_policy_in_force() -> None:
    for policy in (Edf(), Lrs()):
        rig = Rig(policy=policy, max_num_seqs=1)
        _, late, early = rig.arrive_all(
            arrival(4, 8),
            arrival(4, 8, deadline_ns=9000 * MILLISECOND),
            arrival(4, 8, deadline_ns=600 * MILLISECOND),
        )
        place = find_place(rig.state, rig.sequence(late), rig.state.replicas[0])
        assert place is not None
        assert place.ahead is not None
        assert (place.place, place.total, place.ahead.other) == (2, 2, (early, 0))
        assert place.ahead.other_urgency[1] < place.key


def test_what_was_sent_to_a_replica_is_not_in_the_line_of_another() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2, max_num_seqs=1)
    _, _, three, four = rig.arrive_all(*(arrival(4, 8) for _ in range(4)))
    lines = [
        [sequence.request for _, sequence in line_of(rig.state, rig.sequence(three), replica)]
        for replica in rig.state.replicas
    ]
    assert lines == [[three], [four]]
    assert line_of(rig.state, rig.sequence(three), None) == []


def test_residents_have_a_place_too_and_the_ended_none() -> None:
    rig = Rig(max_num_batched_tokens=8)
    one, two = rig.arrive_all(arrival(4, 8), arrival(20, 8))
    places = [find_place(rig.state, rig.sequence(request), None) for request in (one, two)]
    assert [(place.line, place.place, place.total, place.replica) for place in places if place is not None] == [
        ("decodes", 1, 1, 0),
        ("partial prefills", 1, 1, 0),
    ]
    closing = rig.arrive(1, 1, has_text_ends=True)
    waits = rig.arrive(waits_for_grammar=True)
    assert find_place(rig.state, rig.sequence(waits), None) is None
    while rig.sequence(closing).state.name != "CLOSING":
        rig.complete()
    assert find_place(rig.state, rig.sequence(closing), None) is None
