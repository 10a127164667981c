"""The invariants catch a state that was damaged on purpose: a check that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from eventlm.core.state.sequence import State
from eventlm.core.state.validate import validate, validate_liveness, validate_part
from eventlm.errors import InvariantError, LivenessError
from eventlm.events import Paused
from tests.core.rig import MILLISECOND, Rig, arrival


def busy() -> Rig:
    """Two run, one of them a partial prefill, two wait, one closes."""
    rig = Rig(max_num_seqs=3, max_num_batched_tokens=8)
    rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    rig.arrive_all(arrival(3, 9, blocks=[]), arrival(30, 9, blocks=[1, 2, 3]), arrival(9, 9), arrival(9, 9))
    validate(rig.state)
    return rig


def _leak(rig: Rig) -> None:
    rig.state.replicas[0].pool.allocate(1)


def _share(rig: Rig) -> None:
    first, second = rig.state.replicas[0].running[:2]
    second.block_table[-1] = first.block_table[-1]


def _count(rig: Rig) -> None:
    rig.state.replicasets[0].num_waiting += 1


def _closing(rig: Rig) -> None:
    rig.state.replicasets[0].num_closing -= 1


def _lose_from_queue(rig: Rig) -> None:
    rig.state.replicasets[0].shared_queue.members.pop()


def _run_twice(rig: Rig) -> None:
    replica = rig.state.replicas[0]
    replica.running.append(replica.running[-1])


def _tokens(rig: Rig) -> None:
    rig.state.replicas[0].admitted_tokens += 1


def _partials(rig: Rig) -> None:
    rig.state.replicas[0].num_partial += 1


def _order(rig: Rig) -> None:
    rig.state.replicas[0].running.reverse()


def _limit(rig: Rig) -> None:
    rig.state.replicas[0].running[0].pending_tokens = 100


def _state(rig: Rig) -> None:
    rig.state.replicas[0].running[0].state = State.PREFILL


def _digest(rig: Rig) -> None:
    rig.state.sequences_digest += 1


def _tree(rig: Rig) -> None:
    rig.state.replicas[0].running[1].block_names[0] = 99


@pytest.mark.parametrize(("damage", "said"), [
    (_leak, "has 1 references, and is in 0 tables"),
    (_share, "references, and is in 2 tables"),
    (_count, "are counted"),
    (_closing, "are counted"),
    (_lose_from_queue, "wrong number of places"),
    (_run_twice, "wrong number of places"),
    (_tokens, "admitted tokens"),
    (_partials, "partial prefills"),
    (_order, "out of order"),
    (_limit, "beyond its limit"),
    (_state, "wrong state for its prefill"),
    (_digest, "incremental digest"),
    (_tree, "the tree has not"),
])  # fmt: skip
def test_damage_is_named(damage: Callable[[Rig], None], said: str) -> None:
    rig = busy()
    damage(rig)
    with pytest.raises(InvariantError, match=said) as raised:
        validate(rig.state)
    assert raised.value.exit_code == 11
    assert f"after event {rig.core.next_seq - 1}" in str(raised.value)


def test_a_cache_that_outlives_its_worker_is_named() -> None:
    rig = Rig()
    rig.arrive(9, 1, blocks=[1, 2])
    rig.finish_all()
    rig.state.replicas[0].up = False
    with pytest.raises(InvariantError, match="its cache can be hit"):
        validate(rig.state)


def test_parts_in_turn_are_the_whole() -> None:
    rig = Rig(num_blocks=5000)
    damaged = [1000, 2500, 4999]
    for block in damaged:
        rig.state.replicas[0].pool.references[block] += 1
    for turn in range(6):
        with pytest.raises(InvariantError) as raised:
            validate_part(rig.state, turn)
        assert [block for block in damaged if f"block {block} has 1 references" in str(raised.value)] == [
            damaged[turn % 3]
        ]


def test_a_step_that_is_planned_after_a_long_one_is_named() -> None:
    rig = Rig(max_steps_in_flight=2, max_decodes_in_flight_per_seq=2, run_ahead_ms=10)
    rig.arrive(4, 9)
    steps = rig.state.replicas[0].in_flight
    steps[1] = structs.replace(steps[1], predicted_ns=10 * MILLISECOND)
    validate(rig.state)
    steps[0] = structs.replace(steps[0], predicted_ns=10 * MILLISECOND)
    with pytest.raises(InvariantError, match="replica 0: a step is planned after step 0, which takes 10000000 ns"):
        validate(rig.state)


def test_a_sequence_that_waits_while_nothing_is_under_way_is_named() -> None:
    rig = busy()
    rig.state.replicas[0].in_flight.clear()
    with pytest.raises(LivenessError, match="nothing is in flight, but <") as raised:
        validate_liveness(rig.state)
    assert raised.value.exit_code == 12


def test_a_pause_a_missing_worker_and_an_owed_answer_are_reasons_to_wait() -> None:
    rig = busy()
    rig.feed(Paused())
    rig.complete()
    validate_liveness(rig.state)
    rig = Rig(up=False)
    rig.arrive()
    validate_liveness(rig.state)
    rig = Rig()
    rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    rig.arrive(4, 1, waits_for_grammar=True)
    validate_liveness(rig.state)
