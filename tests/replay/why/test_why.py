"""What there is to know of a sequence, and clear errors where there is nothing."""

from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.replay.why.why import live_sequence
from tests.core.rig import arrival
from tests.replay.why.watched import WatchedRig


def test_one_in_a_step() -> None:
    rig = WatchedRig(max_steps_in_flight=2)
    request = rig.arrive(6, 20)
    rig.complete()
    found = rig.ask(request)
    assert (found.request, found.index, found.n, found.state) == (request, 0, 1, "decode")
    assert (found.prompt_tokens, found.num_tokens, found.max_total_tokens) == (6, 7, 26)
    assert (found.cause, found.replica, found.steps) == (None, 0, [1])
    assert found.now_ns == rig.now_ns
    assert found.next_s == rig.state.next_seq
    assert found.num_blocks == len(rig.sequence(request).block_table)
    assert found.pool is not None
    assert [holder.sequence.request for holder in found.pool.holders] == [request]


def test_one_that_waits_again() -> None:
    rig = WatchedRig(num_blocks=6, max_model_len=20)
    first, _, third = rig.arrive_all(*(arrival(4, 12) for _ in range(3)))
    for _ in range(6):
        rig.complete()
    found = rig.ask(third)
    assert (found.cause, found.state, found.num_preemptions, found.steps) == ("blocks", "waiting", 1, [])
    assert found.place is not None
    assert (found.place.place, found.place.line) == (1, "waiting")
    assert found.pool is not None
    assert found.pool.holders[0].sequence.request == first


def test_which_of_all_that_is_not_live_it_is() -> None:
    rig = WatchedRig()
    done = rig.arrive(4, 1)
    rig.complete()
    pair = rig.arrive(4, 4, n=2)
    for request, index, message in (
        (rig.state.next_seq, 0, "has not arrived"),
        (done, 0, "is not live here"),
        (pair, 2, "has no sample 2, it has 2 samples"),
        (pair, -1, "has no sample -1"),
    ):
        with pytest.raises(UsageError, match=message):
            rig.ask(request, index)
    rig.complete(ends=[(0, "eos")])
    with pytest.raises(UsageError, match=rf"{pair}\.0 has ended"):
        rig.ask(pair)
    assert live_sequence(rig.state, pair, 1) is rig.sequence(pair, 1)
