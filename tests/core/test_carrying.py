"""Requests of a run go on in a core with other limits, other plug-ins or another number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.config.core import Forwarding
from eventlm.core.carrying import carry, read_carried
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.sequence import State
from eventlm.core.state.validate import validate
from eventlm.errors import InvariantError
from eventlm.events import Arrived, Cancelled, Finished, Forwarded, Launched, Resumed, TextEnded, TimerDue
from eventlm.policies.edf import Edf
from tests.core.rig import MILLISECOND, Rig, arrival, rows
from tests.core.test_forwarding import Backends


def carried(rig: Rig, into: Rig, changed: dict[int, Arrived] | None = None) -> Rig:
    """`into` as a rig that has the requests of another one. changed: their arrivals; by default as they were."""
    predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
    first, *others = [SetParts(each.config, each.plugins, predictor) for each in into.state.replicasets]
    taken = read_carried(rig.core.snapshot())
    into.core = carry(taken, taken.arrivals if changed is None else changed, *first, others)
    into.state = into.core.state
    into.now_ns = rig.now_ns
    validate(into.state)
    into.recover()
    return into


def busy_rig(**limits: Any) -> Rig:
    """One that has requests in each state: two decode, one is in its prompt, one waits, and one for its grammar."""
    rig = Rig(max_num_batched_tokens=8, max_num_seqs=3, **limits)
    rig.arrive_all(arrival(4, 6, blocks=[7]), arrival(4, 6))
    rig.complete()
    rig.arrive_all(arrival(20, 4, blocks=[7, 8, 9, 10, 11]), arrival(4, 4), arrival(4, 4, waits_for_grammar=True))
    rig.complete()
    states = [request.sequences[0].state for request in rig.state.requests.values()]
    assert states == [State.DECODE, State.DECODE, State.PREFILL, State.WAITING, State.WAITING_FOR_GRAMMAR]
    return rig


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"num_replicas": 2},
        {"block_size": 8, "num_blocks": 16},
        {"num_blocks": 100, "max_num_seqs": 1},
        {"policy": Edf()},
        {"max_steps_in_flight": 2, "max_decodes_in_flight_per_seq": 2},
    ],
)
def test_sequences_go_on_with_what_they_have(limits: dict[str, Any]) -> None:
    rig = busy_rig()
    seqs = [*rig.state.requests]
    has_other_blocks = "block_size" in limits
    arrivals = read_carried(rig.core.snapshot()).arrivals
    if has_other_blocks:
        arrivals = {seq: structs.replace(each, blocks=each.blocks[:2]) for seq, each in arrivals.items()}
    other = carried(rig, Rig(up=False, **limits), arrivals)
    assert [*other.state.requests] == seqs
    assert [other.sequence(seq).num_output_tokens for seq in seqs] == [2, 2, 0, 0, 0]
    assert other.state.num_waiting == len(seqs)
    assert not any(replica.up for replica in other.state.replicas)
    other.start_workers()
    other.finish_all()
    ends = sorted(other.finished())
    assert ends == [(seq, 0, "length", most) for seq, most in zip(seqs[:4], (6, 6, 4, 4), strict=True)]
    assert other.sequence(seqs[4]).state is State.WAITING_FOR_GRAMMAR


def test_requests_may_stay_behind() -> None:
    rig = busy_rig()
    taken = read_carried(rig.core.snapshot())
    first, *_ = taken.arrivals
    other = carried(rig, Rig(up=False), {first: taken.arrivals[first]})
    other.start_workers()
    other.finish_all()
    assert other.finished() == [(first, 0, "length", 6)]


def test_one_whose_end_was_seen_waits_for_the_end_of_its_text() -> None:
    rig = Rig()
    seq = rig.arrive(4, 1, has_text_ends=True, n=2)
    rig.complete()
    rig.feed(TextEnded(request=seq, index=1, position=1))
    other = carried(rig, Rig(up=False, num_blocks=8))
    assert [each.state for each in other.state.requests[seq].sequences] == [State.CLOSING, State.FINISHED]
    other.feed(TextEnded(request=seq, index=0, position=1))
    assert other.of(Finished)[0].reason == "length"
    assert not other.state.requests


def test_deadlines_run_on() -> None:
    rig = Rig(up=False)
    late, early = rig.arrive(4, 4, deadline_ns=50 * MILLISECOND, drop_if_late=True), rig.arrive(4, 4)
    other = carried(rig, Rig(up=False, num_replicas=2))
    due_ns = other.core.next_timer_ns
    assert due_ns is not None
    other.feed(TimerDue(due_ns=due_ns), at=due_ns)
    assert other.finished() == [(late, 0, "deadline", 0)]
    assert [*other.state.requests] == [early]


def test_the_earliest_of_many_deadlines_comes_first() -> None:
    rig = Rig(up=False)
    milliseconds = (10, 60, 20, 70, 80, 30, 40)
    seqs = {each: rig.arrive(4, 4, deadline_ns=each * MILLISECOND, drop_if_late=True) for each in milliseconds}
    for ended in (20, 10):
        rig.feed(Cancelled(request=seqs[ended]))
    other = carried(rig, Rig(up=False))
    assert other.core.next_timer_ns == min(due_ns for due_ns, _ in other.state.timers)


def test_a_pause_stays() -> None:
    rig = busy_rig()
    rig.state.paused = True
    other = carried(rig, Rig(up=False))
    other.start_workers()
    assert not other.of(Launched)
    other.feed(Resumed())
    assert other.of(Launched)


def test_sets_may_have_other_numbers() -> None:
    rig = Rig()
    first, second = rig.arrive(4, 4), rig.arrive(4, 4)
    rig.complete()
    taken = read_carried(rig.core.snapshot())
    arrivals = taken.arrivals | {second: structs.replace(taken.arrivals[second], replicaset=1)}
    other = carried(rig, Rig(up=False, sets=[{"num_replicas": 2}]), arrivals)
    other.start_workers()
    launched = {launch.replica: rows(launch) for launch in other.of(Launched)}
    assert launched[0] == [first]
    assert second in {seq for replica in (1, 2) for seq in launched.get(replica, [])}


def test_those_of_other_servers_are_sent_again() -> None:
    backends = Backends(2, forwards=Forwarding())
    seq = backends.arrive(4, 9)
    backends.stream(seq, 3)
    other = Backends(3, forwards=Forwarding())
    carried(backends, other)
    other.feed(*(other.up(index, epoch=2) for index in range(3)))
    [forwarded] = other.of(Forwarded)
    assert (forwarded.request, forwarded.attempt) == (seq, 1)
    other.feed(Cancelled(request=seq))
    assert other.finished() == [(seq, 0, "cancelled", 3)]


def test_what_is_no_snapshot_is_refused() -> None:
    for content in (
        b"{}",
        b"no",
        b'{"next_seq":1,"now_ns":1,"paused":false,"rng_digest":"","timers":[],"requests":[1]}',
    ):
        with pytest.raises(InvariantError, match="cannot be read"):
            read_carried(content)
