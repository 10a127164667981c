"""What a completed step confirms, drops and ends; and completions that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.core.state.sequence import State
from eventlm.errors import InvariantError
from eventlm.events import Cancelled, Closing, Emitted, Finished, TextEnded, WorkerUp
from tests.core.rig import Rig, arrival


def emitted(rig: Rig) -> Emitted:
    (found,) = rig.of(Emitted)
    return found


@pytest.mark.parametrize("reason", ["eos", "stop_token", "grammar"])
def test_an_end_that_the_worker_saw_ends_the_sequence(reason: str) -> None:
    rig = Rig()
    seq = rig.arrive(4, 9)
    rig.complete()
    rig.complete(ends=[(0, reason)])
    assert rig.finished() == [(seq, 0, reason, 2)]
    assert not rig.state.requests


def test_length_is_the_cores_own_decision_and_yields_to_what_the_worker_saw() -> None:
    for ends, reason in (([], "length"), ([(0, "eos")], "eos")):
        rig = Rig()
        seq = rig.arrive(4, 1)
        rig.complete(ends=ends)
        assert rig.finished() == [(seq, 0, reason, 1)]


@pytest.mark.parametrize("kind", ["score", "pool"])
def test_a_prompt_without_output_is_complete_with_its_last_chunk(kind: str) -> None:
    rig = Rig(max_num_batched_tokens=4)
    seq = rig.arrive(10, 0, kind=kind)
    for _ in range(3):
        assert rig.finished() == []
        rig.complete()
    assert rig.finished() == [(seq, 0, "complete", 0)]


@pytest.mark.parametrize("kind", ["score", "pool", "generate"])
def test_a_prompt_may_end_with_an_error_in_any_of_its_chunks(kind: str) -> None:
    """Also while the next chunk is in flight."""
    rig = Rig(max_num_batched_tokens=4, max_steps_in_flight=2)
    seq = rig.arrive(10, 5 if kind == "generate" else 0, kind=kind)
    rig.complete(ends=[(0, "error")])
    assert rig.finished() == [(seq, 0, "error", 0)]
    rig.finish_all()
    assert len(rig.finished()) == 1
    assert not rig.state.requests


def test_tokens_of_an_ended_sequence_are_dropped() -> None:
    rig = Rig(max_steps_in_flight=3, max_decodes_in_flight_per_seq=3)
    seq, other = rig.arrive_all(arrival(4, 9), arrival(4, 9))
    rig.complete(ends=[(0, "eos")])
    assert emitted(rig).num_tokens == 2
    rig.complete()
    assert emitted(rig).dropped == [(0, 1)]
    assert emitted(rig).num_tokens == 1
    assert rig.finished() == [(seq, 0, "eos", 1)]
    assert rig.sequence(other).num_output_tokens == 2


def test_tokens_of_a_closing_sequence_are_dropped() -> None:
    rig = Rig(max_steps_in_flight=2, max_decodes_in_flight_per_seq=2)
    seq = rig.arrive(4, 9, has_text_ends=True)
    rig.complete(ends=[(0, "eos")])
    assert [found.position for found in rig.of(Closing)] == [1]
    rig.complete()
    assert emitted(rig).dropped == [(0, 1)]
    rig.feed(TextEnded(request=seq, index=0, position=1))
    assert rig.finished() == [(seq, 0, "eos", 1)]


def test_tokens_of_a_preempted_sequence_are_kept() -> None:
    rig = Rig(max_num_seqs=1, max_steps_in_flight=2)
    victim = rig.arrive(4, 9)
    rig.complete()
    rig.arrive(1, 1, priority=-1)
    sequence = rig.sequence(victim)
    assert (sequence.state, sequence.in_flight) == (State.WAITING, 1)
    assert not sequence.ticket, "in line although a step of it is in flight"
    rig.complete()
    assert sequence.num_output_tokens == 2
    rig.finish_all()
    assert (victim, 0, "length", 9) in rig.finished()


def test_a_preempted_sequence_may_end_by_a_step_that_was_in_flight() -> None:
    for has_text_ends in (False, True):
        rig = Rig(max_num_seqs=1, max_steps_in_flight=2)
        victim = rig.arrive(4, 9, has_text_ends=has_text_ends)
        rig.complete()
        rig.arrive(1, 1, priority=-1)
        rig.complete(ends=[(0, "eos")])
        if has_text_ends:
            assert rig.sequence(victim).state is State.CLOSING
            rig.feed(TextEnded(request=victim, index=0, position=2))
        assert rig.finished()[0] == (victim, 0, "eos", 2)
        rig.finish_all()
        assert len(rig.finished()) == 2


def test_a_completion_of_an_older_worker_is_a_no_op() -> None:
    rig = Rig()
    seq = rig.arrive(4, 9)
    stale = rig.completion()
    rig.lose()
    rig.feed(stale)
    assert rig.last == []
    rig.feed(WorkerUp(replica=0, epoch=2))
    before = rig.core.digests()
    rig.feed(stale)
    assert rig.last == []
    assert rig.core.digests() == before
    assert rig.sequence(seq).num_output_tokens == 0


@pytest.mark.parametrize("change", [
    {"step": 7}, {"c": 1}, {"produced": []}, {"produced": [1, 1]}, {"produced": [2]}, {"produced": [-1]},
    {"ends": [(1, "eos")]}, {"ends": [(-1, "eos")]}, {"filled": [(3, [9])]}, {"filled": [(0, [9, 10])]},
])  # fmt: skip
def test_completions_that_contradict_their_launch_are_refused(change: dict[str, Any]) -> None:
    rig = Rig()
    rig.arrive(4, 9)
    with pytest.raises(InvariantError, match="step"):
        rig.feed(structs.replace(rig.completion(), **change))


def test_an_end_of_a_row_that_samples_nothing_is_refused() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.arrive(10, 9)
    with pytest.raises(InvariantError, match="was not launched for"):
        rig.complete(ends=[(0, "eos")])


def test_a_completion_twice_is_refused() -> None:
    rig = Rig(max_steps_in_flight=1)
    rig.arrive(4, 1)
    completion = rig.completion()
    rig.feed(completion)
    with pytest.raises(InvariantError):
        rig.feed(completion)


def test_cancelling_in_flight_leaves_nothing_behind() -> None:
    rig = Rig(max_steps_in_flight=2, max_decodes_in_flight_per_seq=2)
    seq = rig.arrive(4, 9)
    rig.feed(Cancelled(request=seq))
    assert rig.finished() == [(seq, 0, "cancelled", 0)]
    assert rig.state.replicas[0].pool.num_available == 32
    rig.complete()
    assert emitted(rig).dropped == [(0, 1)]
    assert emitted(rig).num_tokens == 0
    assert [type(found) for found in rig.last] == [Emitted]
    rig.complete()
    assert not rig.of(Finished)
