"""Groups, text ends in two phases, cancels, deadlines, grammars, lost front ends."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.core.state.sequence import State
from eventlm.errors import InvariantError
from eventlm.events import (
    Admitted,
    Cancelled,
    Closing,
    Finished,
    FrontEndLost,
    GrammarReady,
    Launched,
    Rejected,
    TextEnded,
    TimerDue,
    TimerSet,
)
from tests.core.rig import MILLISECOND, Rig, arrival, group, rows

# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_group_is_admitted_as_one_with_its_last_member() -> None:
    rig = Rig()
    rig.feed(*group(arrival(), arrival(n=2)))
    admitted = rig.of(Admitted)
    assert [found.request for found in admitted] == [2, 3]
    assert [found.c for found in admitted] == [2, 3]
    assert rows(rig.of(Launched)[0]) == [2, 3, 3]


def test_a_group_that_does_not_fit_is_rejected_as_one() -> None:
    rig = Rig(up=False, max_queue_len=4)
    rig.arrive_all(arrival(n=2))
    rig.feed(*group(arrival(), arrival(n=2)))
    assert [(found.request, found.reason) for found in rig.of(Rejected)] == [(3, "queue_full"), (4, "queue_full")]
    assert not rig.of(Admitted)
    rig.feed(*group(arrival(), arrival()))
    assert len(rig.of(Admitted)) == 2


def test_one_member_beyond_the_context_rejects_the_group() -> None:
    rig = Rig()
    rig.feed(*group(arrival(), arrival(120, 5)))
    assert [found.reason for found in rig.of(Rejected)] == ["context_length"] * 2
    assert rig.arrive(120, 4)


def test_bursts_do_not_slip_through() -> None:
    # Counting and inserting are one step: of twenty in one drain exactly those that fit get in.
    rig = Rig(max_queue_len=3, max_num_seqs=2)
    rig.feed(*(arrival() for _ in range(20)))
    assert (len(rig.of(Admitted)), len(rig.of(Rejected))) == (5, 15)
    rig.feed(*(arrival() for _ in range(20)))
    assert len(rig.of(Admitted)) == 0


def test_without_a_worker_there_are_no_free_slots() -> None:
    rig = Rig(up=False, max_queue_len=3)
    rig.feed(*(arrival() for _ in range(5)))
    assert len(rig.of(Admitted)) == 3


def test_closing_sequences_count_against_the_queue() -> None:
    rig = Rig(max_queue_len=1, max_num_seqs=1)
    seqs = rig.arrive_all(*(arrival(4, 1, has_text_ends=True) for _ in range(2)))
    rig.complete()
    rig.complete()
    assert [rig.sequence(seq).state for seq in seqs] == [State.CLOSING] * 2
    rig.feed(arrival())
    assert rig.of(Rejected)
    rig.feed(TextEnded(request=seqs[0], index=0, position=1))
    rig.feed(arrival())
    assert rig.of(Admitted)


def test_offline_groups_are_not_bound_by_the_queue() -> None:
    rig = Rig(up=False, max_queue_len=3)
    rig.feed(*group(*(arrival(offline=True) for _ in range(50))))
    assert len(rig.of(Admitted)) == 50
    rig.feed(arrival())
    assert rig.of(Rejected)


@pytest.mark.parametrize("change", [{"group_index": 2}, {"group_index": 0}, {"group_size": 4}])
def test_a_group_comes_whole_and_in_order(change: dict[str, int]) -> None:
    rig = Rig()
    first, second, _ = group(arrival(), arrival(), arrival())
    with pytest.raises(InvariantError, match="member"):
        rig.feed(first, structs.replace(second, **change))


def test_a_drain_does_not_end_in_the_middle_of_a_group() -> None:
    rig = Rig()
    with pytest.raises(InvariantError, match="in the middle of a group"):
        rig.feed(group(arrival(), arrival())[0])


@pytest.mark.parametrize("fields", [{"n": 0}, {"prompt_tokens": 0}, {"max_tokens": 0}])
def test_arrivals_of_nothing_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvariantError, match="has no sequence, no prompt or nothing to produce"):
        Rig().feed(arrival(**fields))


# --- text ends -------------------------------------------------------------------------------------------------------


def with_text_ends(max_tokens: int = 9, num_steps: int = 4, n: int = 1) -> tuple[Rig, int]:
    rig = Rig()
    seq = rig.arrive(4, max_tokens, has_text_ends=True, n=n)
    for _ in range(num_steps):
        rig.complete()
    return rig, seq


@pytest.mark.parametrize(("said", "reason"), [("stop", "stop"), ("tool_calls", "tool_calls"), ("other", "stop")])
def test_an_end_in_the_text_finishes_at_once(said: str, reason: str) -> None:
    rig, seq = with_text_ends()
    rig.feed(TextEnded(request=seq, index=0, position=3, reason=said))
    assert rig.finished() == [(seq, 0, reason, 3)]
    assert rig.state.replicas[0].pool.num_available == 32


def test_an_end_that_the_worker_saw_waits_for_the_edge() -> None:
    rig, seq = with_text_ends(num_steps=2)
    rig.complete(ends=[(0, "eos")])
    (closing,) = rig.of(Closing)
    assert (closing.request, closing.reason, closing.position) == (seq, "eos", 3)
    assert rig.finished() == []
    # Its blocks are free already.
    assert rig.state.replicas[0].pool.num_available == 32
    rig.feed(TextEnded(request=seq, index=0, position=3))
    assert rig.finished() == [(seq, 0, "eos", 3)]


def test_the_edges_own_end_beats_the_one_it_was_asked_about() -> None:
    rig, seq = with_text_ends(num_steps=2)
    rig.complete(ends=[(0, "eos")])
    rig.feed(TextEnded(request=seq, index=0, position=2, reason="stop"))
    assert rig.finished() == [(seq, 0, "stop", 2)]


def test_early_or_late_the_result_is_the_same() -> None:
    results = []
    for num_steps in range(3, 10):
        rig, seq = with_text_ends(max_tokens=8, num_steps=min(num_steps, 8))
        rig.feed(TextEnded(request=seq, index=0, position=3, reason="stop"))
        results.append(rig.finished())
    assert results == [[(results[0][0][0], 0, "stop", 3)]] * 7


def test_an_answer_without_an_end_before_it_was_asked_changes_nothing() -> None:
    rig, seq = with_text_ends()
    rig.feed(TextEnded(request=seq, index=0, position=4))
    assert not rig.of(Finished)
    rig.finish_all()
    rig.feed(TextEnded(request=seq, index=0, position=9))
    assert rig.finished() == [(seq, 0, "length", 9)]


def test_duplicates_strangers_and_latecomers_are_no_ops() -> None:
    rig, seq = with_text_ends(n=2)
    end = TextEnded(request=seq, index=0, position=2, reason="stop")
    rig.feed(end)
    before = len(rig.decisions)
    for again in (
        end,
        structs.replace(end, index=2),
        structs.replace(end, index=-1),
        structs.replace(end, request=999),
        structs.replace(end, request=0),
    ):
        rig.feed(again)
    assert not [found for found in rig.decisions[before:] if isinstance(found, Finished)]
    rig.feed(Cancelled(request=seq))
    assert rig.finished() == [(seq, 0, "stop", 2), (seq, 1, "cancelled", 4)]
    rig.feed(structs.replace(end, index=1))
    assert rig.last == []


def test_positions_beyond_what_is_confirmed_are_cut() -> None:
    for position, wanted in ((99, 4), (-5, 0)):
        rig, seq = with_text_ends()
        rig.feed(TextEnded(request=seq, index=0, position=position, reason="stop"))
        assert rig.finished() == [(seq, 0, "stop", wanted)]


def test_requests_without_text_ends_take_none() -> None:
    rig = Rig()
    seq = rig.arrive(4, 9)
    rig.complete()
    rig.feed(TextEnded(request=seq, index=0, position=1, reason="stop"))
    assert rig.finished() == []


# --- cancels, front ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(5))
def test_a_cancel_ends_all_samples_whatever_they_do(num_steps: int) -> None:
    rig = Rig(max_num_seqs=2)
    seq = rig.arrive(4, 2, n=3, has_text_ends=True)  # two run or close, one waits
    for _ in range(min(num_steps, 4)):
        if rig.flying[0]:
            rig.complete()
    rig.feed(Cancelled(request=seq))
    assert [end[:3] for end in rig.finished()] == [(seq, index, "cancelled") for index in range(3)]
    assert not rig.state.requests
    rig.feed(Cancelled(request=seq))
    assert not rig.of(Finished)
    rig.finish_all()


def test_a_cancel_of_an_unknown_request_is_a_no_op() -> None:
    rig = Rig()
    rig.feed(Cancelled(request=12345))
    assert rig.last == []


def test_a_cancel_in_the_drain_of_the_arrival_leaves_no_launch() -> None:
    rig = Rig()
    rig.feed(arrival(), Cancelled(request=rig.core.next_seq))
    assert [type(found) for found in rig.last] == [Admitted, Finished]


def test_a_lost_front_end_takes_only_its_own_requests_with_it() -> None:
    rig = Rig(max_num_seqs=2)
    seqs = rig.arrive_all(*(arrival(4, 9, front_end=index % 2) for index in range(4)))
    rig.feed(FrontEndLost(front_end=1))
    assert [end[:3] for end in rig.finished()] == [(seqs[1], 0, "front_end_lost"), (seqs[3], 0, "front_end_lost")]
    rig.finish_all()
    assert len(rig.finished()) == 4


# --- deadlines -------------------------------------------------------------------------------------------------------


#: What the rig's predictor says of a prompt of 4 tokens: 2 ms a step and 40 us a token, and what attention reads.
FOUR_TOKENS_NS = 2_160_088


def test_a_request_that_asked_for_it_is_dropped_once_it_cannot_be_in_time() -> None:
    rig = Rig(max_num_seqs=1)
    running = rig.arrive(4, 9)
    late = rig.arrive(4, 9, deadline_ns=5 * MILLISECOND, drop_if_late=True)
    (timer,) = rig.of(TimerSet)
    # A nanosecond behind the last moment at which its prompt could begin.
    assert timer.due_ns == rig.now_ns + 5 * MILLISECOND - FOUR_TOKENS_NS + 1 == rig.core.next_timer_ns
    rig.feed(TimerDue(due_ns=timer.due_ns), at=timer.due_ns)
    assert rig.finished() == [(late, 0, "deadline", 0)]
    assert rig.core.next_timer_ns is None
    rig.finish_all()
    assert rig.finished()[1][0] == running


def test_who_cannot_be_in_time_from_the_start_is_dropped_as_it_arrives() -> None:
    rig = Rig()
    rig.arrive_all(arrival(4, 9, n=2, deadline_ns=FOUR_TOKENS_NS - 1, drop_if_late=True))
    assert [(found.index, found.reason) for found in rig.of(Finished)] == [(0, "deadline"), (1, "deadline")]
    assert not rig.of(TimerSet)
    assert not rig.of(Launched)
    assert not rig.state.requests
    assert rig.state.num_waiting == 0
    rig.arrive_all(arrival(4, 9, deadline_ns=FOUR_TOKENS_NS, drop_if_late=True))
    assert rig.of(Launched)


def test_a_prediction_drops_no_sequence_that_runs() -> None:
    rig = Rig()
    seq = rig.arrive(4, 9, deadline_ns=5 * MILLISECOND, drop_if_late=True)
    assert rig.of(Launched)
    (timer,) = rig.of(TimerSet)
    rig.feed(TimerDue(due_ns=timer.due_ns), at=timer.due_ns)
    # It is looked at again when the deadline itself has come.
    (again,) = rig.of(TimerSet)
    assert again.due_ns == rig.sequence(seq).arrival.ts + 5 * MILLISECOND
    rig.feed(TimerDue(due_ns=again.due_ns), at=again.due_ns)
    assert rig.finished() == [(seq, 0, "deadline", 0)]


def test_what_can_be_hit_meanwhile_gives_more_time() -> None:
    rig = Rig(max_num_seqs=1)
    blocks = [1, 2, 3]
    rig.arrive(13, 1)
    rig.arrive(13, 9, blocks=blocks)
    seq = rig.arrive(13, 9, blocks=blocks, deadline_ns=60 * MILLISECOND, drop_if_late=True)
    first_ns = rig.core.next_timer_ns
    assert first_ns is not None
    rig.complete()
    rig.feed(TimerDue(due_ns=first_ns), at=first_ns)
    # Twelve of its thirteen tokens are being computed for the one ahead of it.
    (again,) = rig.of(TimerSet)
    assert again.due_ns - first_ns >= 12 * 40_000
    assert rig.sequence(seq).state is State.WAITING
    rig.feed(TimerDue(due_ns=again.due_ns), at=again.due_ns)
    assert rig.finished()[-1] == (seq, 0, "deadline", 0)


def test_the_slo_counts_where_there_is_no_deadline() -> None:
    rig = Rig(up=False)
    rig.arrive(4, 9, slo_ttft_ns=5 * MILLISECOND, drop_if_late=True)
    assert [found.due_ns for found in rig.of(TimerSet)] == [rig.now_ns + 5 * MILLISECOND - FOUR_TOKENS_NS + 1]


def test_who_has_a_first_token_is_on_time() -> None:
    rig = Rig()
    seq = rig.arrive(4, 3, deadline_ns=5 * MILLISECOND, drop_if_late=True)
    rig.complete()
    due_ns = rig.core.next_timer_ns
    assert due_ns is not None
    rig.feed(TimerDue(due_ns=due_ns), at=due_ns)
    assert rig.finished() == []
    assert rig.core.next_timer_ns is None
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 3)]


def test_without_the_wish_or_a_deadline_there_is_no_timer() -> None:
    rig = Rig()
    rig.arrive(4, 9, deadline_ns=5 * MILLISECOND)
    assert not rig.of(TimerSet)
    rig.arrive(4, 9, drop_if_late=True)
    assert not rig.of(TimerSet)


def test_a_timer_reveals_nothing_of_the_future() -> None:
    rig = Rig()
    with pytest.raises(InvariantError, match="is after"):
        rig.feed(TimerDue(due_ns=10**15))


# --- grammars --------------------------------------------------------------------------------------------------------


def test_nothing_is_launched_before_the_grammar_is_there() -> None:
    rig = Rig()
    seq = rig.arrive(4, 3, waits_for_grammar=True, n=2)
    other = rig.arrive(4, 3)
    assert rows(rig.of(Launched)[0]) == [other]
    assert rig.sequence(seq).state is State.WAITING_FOR_GRAMMAR
    rig.feed(GrammarReady(request=seq))
    rig.complete()
    assert seq in rows(rig.of(Launched)[0])
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_a_grammar_that_cannot_be_built_ends_its_request() -> None:
    rig = Rig()
    seq = rig.arrive(4, 3, waits_for_grammar=True, n=2)
    rig.feed(GrammarReady(request=seq, error="no such rule"))
    assert rig.finished() == [(seq, 0, "error", 0), (seq, 1, "error", 0)]


def test_a_repeated_or_unneeded_grammar_is_a_no_op() -> None:
    rig = Rig()
    seq = rig.arrive(4, 3, waits_for_grammar=True)
    rig.feed(GrammarReady(request=seq))
    rig.feed(GrammarReady(request=seq))
    rig.feed(GrammarReady(request=seq, error="too late"))
    rig.feed(GrammarReady(request=999))
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 3)]


def test_a_request_may_be_cancelled_or_late_while_its_grammar_is_built() -> None:
    rig = Rig()
    cancelled = rig.arrive(4, 3, waits_for_grammar=True)
    late = rig.arrive(4, 3, waits_for_grammar=True, deadline_ns=5 * MILLISECOND, drop_if_late=True)
    due_ns = rig.core.next_timer_ns
    assert due_ns is not None
    rig.feed(Cancelled(request=cancelled), TimerDue(due_ns=due_ns), at=due_ns)
    assert rig.finished() == [(cancelled, 0, "cancelled", 0), (late, 0, "deadline", 0)]
