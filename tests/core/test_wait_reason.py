"""What keeps a sequence from running: each cause where it is known by construction."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from eventlm.core.plugin import Batcher, Policy, SequenceView, StepLoad
from eventlm.core.predictor import Predictor
from eventlm.core.scheduler import waiting_head
from eventlm.core.state.snapshot import take
from eventlm.core.state.step_plan import WaitReason
from eventlm.core.wait_reason import (
    WaitWatch,
    find_present_wait_reason,
    find_wait_reason,
    first_plan_that_counts,
    urgency_now,
)
from eventlm.events import BackendDown, GrammarReady, Launched, Paused, Resumed, TextEnded, WorkerUp
from eventlm.policies.edf import Edf
from eventlm.policies.round_robin import RoundRobin
from eventlm.types import SequenceId
from tests.core.rig import MILLISECOND, Rig, arrival, rows
from tests.core.test_forwarding import Backends


def ask(rig: Rig, request: int, index: int = 0) -> WaitReason | None:
    """With the plans of the latest drain; asking must not change the state."""
    before = take(rig.state)
    found = find_wait_reason(rig.state, rig.sequence(request, index), rig.state.plans)
    assert take(rig.state) == before
    return found


def cause(rig: Rig, request: int, index: int = 0) -> str:
    found = ask(rig, request, index)
    assert found is not None
    return found.cause


def test_one_that_is_in_a_step_lacks_nothing() -> None:
    rig = Rig()
    assert ask(rig, rig.arrive()) is None


def test_no_worker_is_up() -> None:
    rig = Rig(up=False)
    request = rig.arrive()
    assert cause(rig, request) == "worker"
    rig.feed(WorkerUp(replica=0, epoch=1))
    assert ask(rig, request) is None
    rig.lose()
    assert cause(rig, request) == "worker"


def test_the_grammar_goes_before_a_pause() -> None:
    rig = Rig()
    request = rig.arrive(waits_for_grammar=True)
    rig.feed(Paused())
    assert cause(rig, request) == "grammar"
    rig.feed(GrammarReady(request=request))
    assert cause(rig, request) == "paused"
    rig.feed(Resumed())
    assert ask(rig, request) is None


def test_the_text_is_looked_at() -> None:
    rig = Rig()
    request = rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    assert cause(rig, request) == "text_end"
    rig.feed(TextEnded(request=request, index=0, position=1))
    assert rig.finished() == [(request, 0, "length", 1)]


def test_all_slots_are_taken() -> None:
    rig = Rig(max_num_seqs=2)
    *_, last = rig.arrive_all(arrival(), arrival(), arrival())
    assert ask(rig, last) == WaitReason("sequence_limit", 0)


def test_the_pool_has_too_few_blocks_and_how_many() -> None:
    # 12 blocks of 4 tokens: the first takes 9 of them, the second needs 6.
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    assert ask(rig, second) == WaitReason("blocks", 0, num_lacking=3)


def test_one_that_was_passed_over_lacks_blocks_and_not_a_slot() -> None:
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_num_seqs=2)
    _, large, small, last = rig.arrive_all(arrival(32, 8), arrival(20, 4), arrival(4, 4), arrival(4, 4))
    assert rig.sequence(small).resident
    assert ask(rig, large) == WaitReason("blocks", 0, num_lacking=3)
    assert ask(rig, last) == WaitReason("sequence_limit", 0)


def test_one_that_will_evict_waits_for_a_step_and_not_for_a_slot() -> None:
    rig = Rig(max_num_seqs=1)
    resident = rig.arrive(4, 8)
    urgent, other = rig.arrive_all(arrival(4, 8, priority=-1), arrival(4, 8))
    assert ask(rig, urgent) == WaitReason("steps_in_flight", 0)
    assert ask(rig, other) == WaitReason("steps_in_flight", 0)
    rig.complete()
    assert rig.preempted() == [(resident, "admission")]
    assert ask(rig, urgent) is None
    assert ask(rig, other) == WaitReason("sequence_limit", 0)


def test_who_fits_waits_for_the_head_that_does_not() -> None:
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_skips=0)
    _, second, third = rig.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    assert cause(rig, second) == "blocks"
    assert ask(rig, third) == WaitReason("head_of_line", 0, other=SequenceId(second, 0))
    skipping = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_skips=1)
    *_, third = skipping.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    assert ask(skipping, third) is None


def test_the_budget_of_the_step_is_spent() -> None:
    rig = Rig(max_num_batched_tokens=8)
    first, second, third = rig.arrive_all(arrival(6, 4), arrival(6, 4), arrival(6, 4))
    assert ask(rig, third) == WaitReason("token_budget", 0)
    rig.complete()
    # The second has a chunk of 2 behind it; of the next 8 tokens the first decodes 1 and it takes 4.
    assert [chunk[:4] for chunk in rig.of(Launched)[0].chunks] == [(second, 0, 2, 4), (third, 0, 0, 3)]
    assert ask(rig, first) is None


def test_a_step_that_took_the_whole_line_left_out_nobody() -> None:
    rig = Rig()
    rig.arrive(4, 8)
    assert rig.state.plans[0].load.num_tokens < rig.state.replicasets[0].config.max_num_batched_tokens
    assert rig.state.plans[0].rest is None


def test_a_decode_that_the_budget_left_out() -> None:
    rig = Rig(max_num_batched_tokens=2)
    requests = rig.arrive_all(arrival(1, 9), arrival(1, 9), arrival(1, 9))
    rig.complete()
    # Two tokens a step: the two that came first decode, the third has been launched and waits for its turn.
    assert [ask(rig, request) for request in requests] == [None, None, WaitReason("token_budget", 0)]


def test_who_comes_while_all_steps_are_in_flight() -> None:
    rig = Rig(max_steps_in_flight=1)
    rig.arrive()
    request = rig.arrive()
    assert rig.of(Launched) == []
    assert ask(rig, request) == WaitReason("steps_in_flight", 0)
    rig.complete()
    assert ask(rig, request) is None


def test_who_comes_during_a_step_that_takes_long() -> None:
    rig = Rig(max_steps_in_flight=2, max_decodes_in_flight_per_seq=2, run_ahead_ms=1)
    rig.arrive()
    request = rig.arrive()
    assert rig.of(Launched) == []
    assert ask(rig, request) == WaitReason("steps_in_flight", 0)
    rig.complete()
    assert ask(rig, request) is None


def test_the_present_reason_outlives_a_drain_without_a_plan() -> None:
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64, max_steps_in_flight=1)
    _, second = rig.arrive_all(arrival(32, 4), arrival(20, 4))
    third = rig.arrive(4, 4)
    # Nothing was planned in this drain: the step is still in flight.
    assert ask(rig, second) == WaitReason("steps_in_flight", 0)
    assert find_present_wait_reason(rig.state, rig.sequence(second)) == WaitReason("blocks", 0, num_lacking=3)
    # The plan is older than the third, and says nothing of it.
    assert find_present_wait_reason(rig.state, rig.sequence(third)) == WaitReason("steps_in_flight", 0)
    rig.complete()
    for request in (second, third):
        assert find_present_wait_reason(rig.state, rig.sequence(request)) == ask(rig, request)


class FirstOnly(Batcher, frozen=True, kw_only=True):
    """One prompt a step."""

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        return 0 if load.prefill_tokens else max_tokens


def test_the_batcher_gave_it_nothing() -> None:
    rig = Rig(batcher=FirstOnly())
    first, second = rig.arrive_all(arrival(), arrival())
    assert ask(rig, first) is None
    assert rig.sequence(second).resident
    assert ask(rig, second) == WaitReason("batcher", 0)


def test_a_suspect_is_tried_alone() -> None:
    rig = Rig(max_losses=2)
    first, second = rig.arrive_all(arrival(4, 6), arrival(4, 6))
    rig.lose(0, 1)
    rig.feed(WorkerUp(replica=0, epoch=2))
    assert ask(rig, first) is None
    assert ask(rig, second) == WaitReason("trial", 0, other=SequenceId(first, 0))


def test_rows_of_a_preempted_one_are_in_flight() -> None:
    rig = Rig(policy=Edf(min_deadline_ms=1, evict_margin_ms=0), max_num_seqs=1, max_steps_in_flight=2, max_skips=0)
    victim = rig.arrive(4, 8, priority=3)
    urgent = rig.arrive(4, 8)
    assert rig.preempted() == [(victim, "admission")]
    assert cause(rig, victim) == "draining"
    assert ask(rig, urgent) is None
    rig.complete()
    assert cause(rig, victim) == "sequence_limit"


def test_of_several_replicas_the_nearest_to_taking_it_counts() -> None:
    rig = Rig(num_replicas=2, max_num_seqs=1, max_steps_in_flight=1, num_blocks=12, max_model_len=44)
    one, two, request = rig.arrive_all(arrival(4, 8), arrival(4, 8), arrival(4, 8))
    assert {rig.sequence(one).replica, rig.sequence(two).replica} == {0, 1}
    assert ask(rig, request) == WaitReason("sequence_limit", 0)
    rig.complete(1)
    # In this drain replica 0 had no room for another step, so no plan of it has looked at the request.
    assert ask(rig, request) == WaitReason("steps_in_flight", 0)
    assert rig.state.plans[1].wait_reason(rig.sequence(request)) == WaitReason("sequence_limit", 1)
    homed = Rig(router=RoundRobin(), num_replicas=2, max_num_seqs=1)
    *_, last = homed.arrive_all(arrival(), arrival(), arrival(), arrival())
    assert ask(homed, last) == WaitReason("sequence_limit", 1)


class Shortest(Policy, frozen=True, kw_only=True):
    """Not static: shorter prompts first."""

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        return [sequence.prompt_tokens for sequence in sequences]


@pytest.mark.parametrize("policy", [Shortest(), Edf()])
def test_urgencies_are_those_by_which_the_line_is_ordered(policy: Policy) -> None:
    rig = Rig(policy=policy, max_num_seqs=1, router=RoundRobin())
    running, *waiting = rig.arrive_all(arrival(2, 8, priority=-1), arrival(9, 8), arrival(5, 8), arrival(7, 8))
    urgencies = {request: urgency_now(rig.state, rig.sequence(request)) for request in waiting}
    if isinstance(policy, Shortest):
        assert [urgency[1] for urgency in urgencies.values()] == [9, 5, 7]
    else:
        assert {urgency[1] for urgency in urgencies.values()} == {rig.now_ns + 500 * MILLISECOND}
    head = waiting_head(rig.state, rig.state.replicas[0])
    assert head is not None
    assert (head.urgency, head.sequence.request) == min((urgency, request) for request, urgency in urgencies.items())
    assert urgency_now(rig.state, rig.sequence(running)) == rig.sequence(running).urgency


def test_a_round_that_launched_nothing_has_read_the_keys() -> None:
    """There is room for a second step, and nobody to run in it: the only decode is in the first."""
    fields: dict[str, Any] = {"policy": Shortest(), "max_steps_in_flight": 2, "max_skips": 0}
    rig = Rig(num_blocks=12, max_model_len=44, **fields)
    rig.arrive(24, 8)
    big = rig.arrive(30, 8)
    small = rig.arrive(4, 4, priority=1)
    assert rig.of(Launched) == []
    assert ask(rig, small) == WaitReason("head_of_line", 0, other=SequenceId(big, 0))


def test_a_plan_that_left_it_out_holds_until_the_next_one() -> None:
    rig = Rig(max_num_seqs=1)
    _, request = rig.arrive_all(arrival(), arrival())
    watch = WaitWatch()
    assert watch.look(rig.state, rig.sequence(request)) == WaitReason("sequence_limit", 0)
    assert first_plan_that_counts(rig.state, rig.sequence(request)) == rig.state.next_seq
    later = rig.arrive()
    # The replica has no room for a step, so nothing is planned.
    assert rig.state.plans == {}
    assert cause(rig, request) == "steps_in_flight"
    assert watch.look(rig.state, rig.sequence(request)) == WaitReason("sequence_limit", 0)
    assert WaitWatch().look(rig.state, rig.sequence(later)) == WaitReason("steps_in_flight", 0)
    assert first_plan_that_counts(rig.state, rig.sequence(later)) == rig.flying[0][0].s


def test_a_plan_from_before_a_pause_does_not_count() -> None:
    rig = Rig(max_num_seqs=1)
    _, request = rig.arrive_all(arrival(), arrival())
    watch = WaitWatch()
    causes = []
    for facts in ([], [Paused()], [Resumed()]):
        if facts:
            rig.feed(*facts)
        reason = watch.look(rig.state, rig.sequence(request))
        assert reason is not None
        causes.append(reason.cause)
    assert causes == ["sequence_limit", "paused", "steps_in_flight"]


def test_a_plan_from_before_a_preemption_does_not_count() -> None:
    rig = Rig(num_blocks=6, max_model_len=20)
    *_, third = rig.arrive_all(*(arrival(4, 12) for _ in range(3)))
    watch = WaitWatch()
    for _ in range(5):
        assert watch.look(rig.state, rig.sequence(third)) is None
        rig.complete()
    # The plan that preempted it did not look at the line behind that.
    assert watch.look(rig.state, rig.sequence(third)) == WaitReason("steps_in_flight", 0)
    rig.complete()
    reason = watch.look(rig.state, rig.sequence(third))
    assert reason is not None
    assert reason.cause == "blocks"


def test_the_decodes_beyond_a_steps_share_wait_for_the_next() -> None:
    rig = Rig(num_stages=2, run_ahead_ms=1, max_num_batched_tokens=8)
    first, _, _, last = rig.arrive_all(*(arrival(2, 20) for _ in range(4)))
    rig.arrive(40, 1)
    rig.complete()
    assert [len(launched.decodes) for launched in rig.flying[0]] == [0, 2]
    assert ask(rig, first) is None
    assert ask(rig, last) == WaitReason("micro_batch", 0)
    rig.complete()
    assert ask(rig, last) is None


def test_a_step_of_a_pipeline_has_no_more_rows_than_sequences_run_at_once() -> None:
    rig = Rig(num_stages=2, run_ahead_ms=1, max_num_seqs=2)
    seqs = rig.arrive_all(*(arrival(2, 20) for _ in range(5)))
    assert [rows(launched) for launched in rig.flying[0]] == [seqs[:2], seqs[2:4]]
    rig.complete()
    # As many as two steps have are resident, and wait for a step; the last one waits for a slot.
    assert ask(rig, seqs[-1]) == WaitReason("sequence_limit", 0)


def test_what_keeps_a_sequence_from_other_servers() -> None:
    rig = Backends(2, limit=1)
    first, second = rig.arrive(), rig.arrive()
    waiting = rig.arrive()
    assert ask(rig, first) is None
    assert ask(rig, waiting) == WaitReason("backend_limit", 0)
    rig.feed(Paused())
    assert cause(rig, waiting) == "paused"
    rig.feed(Resumed())
    rig.fail(first)
    assert cause(rig, first) == "backoff"
    # The third has taken its place; once that is free again, the first one avoids it.
    rig.wait()
    assert ask(rig, first) == WaitReason("backend_limit", 0)
    rig.end(waiting)
    assert ask(rig, first) == WaitReason("avoided", 0)
    for replica in range(2):
        rig.feed(BackendDown(replica=replica, epoch=1, reason="drained"))
    assert cause(rig, first) == "backend"
    assert ask(rig, second) is None
