"""How a step is formed: budget, order, chunks, skips, several tokens a row, several steps in flight."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from eventlm.core.predictor import StepShape
from eventlm.core.state.sequence import State
from eventlm.events import Cancelled, Launched, Paused, PredictorSwapped, Resumed, WorkerUp
from eventlm.policies.dynamic import Dynamic
from eventlm.policies.edf import Edf
from eventlm.policies.fixed import Fixed
from eventlm.policies.lrs import Lrs
from tests.core.rig import MILLISECOND, Rig, arrival, rows


def launch_of(rig: Rig) -> Launched:
    (launched,) = rig.of(Launched)
    return launched


def test_a_prompt_is_launched_whole_if_the_budget_allows() -> None:
    rig = Rig()
    seq = rig.arrive(prompt_tokens=10)
    launched = launch_of(rig)
    assert launched.chunks == [(seq, 0, 0, 10, 1)]
    assert launched.decodes == []
    assert launched.num_tokens == 10
    # Three blocks for ten tokens and one more, shipped with the first chunk.
    assert [(row, index, len(blocks)) for row, index, blocks in launched.blocks] == [(0, 0, 4)]


def test_the_budget_is_never_exceeded_and_chunks_add_up() -> None:
    rig = Rig(max_num_batched_tokens=8)
    prompt_tokens = dict(zip(rig.arrive_all(arrival(20, 3), arrival(5, 3), arrival(9, 3)), (20, 5, 9), strict=True))
    done = dict.fromkeys(prompt_tokens, 0)
    while rig.flying[0]:
        launched = rig.flying[0][0]
        assert launched.num_tokens == len(launched.decodes) + sum(chunk[3] for chunk in launched.chunks) <= 8
        for request, _, start, num_tokens, samples in launched.chunks:
            assert start == done[request]
            done[request] += num_tokens
            assert samples == (done[request] == prompt_tokens[request])
        rig.complete()
    assert done == prompt_tokens


def test_decodes_go_before_chunks_and_the_most_urgent_first() -> None:
    rig = Rig(max_num_batched_tokens=8)
    first = rig.arrive(2, 9)
    second = rig.arrive(2, 9, priority=-1)
    rig.complete()
    third = rig.arrive(20, 2)
    rig.complete()
    launched = launch_of(rig)
    assert [row[0] for row in launched.decodes] == [second, first]
    assert launched.chunks == [(third, 0, 0, 6, 0)]


def test_decodes_beyond_the_budget_wait_their_turn() -> None:
    rig = Rig(max_num_batched_tokens=4)
    seqs = rig.arrive_all(*(arrival(1, 3) for _ in range(6)))
    rig.complete()
    assert [row[0] for row in launch_of(rig).decodes] == seqs[:4]
    rig.finish_all()
    assert len(rig.finished()) == 6


def test_the_budget_ends_the_line_of_decodes_within_a_row_of_several_tokens() -> None:
    for per_row, most in ((1, [1, 1, 1, 1]), (3, [3, 1])):
        rig = Rig(max_num_batched_tokens=4, max_steps_in_flight=2, max_tokens_per_row=per_row)
        seqs = rig.arrive_all(*(arrival(1, 9) for _ in range(6)))
        rig.feed(Paused())
        rig.complete()
        rig.complete()
        # All six are decodes by now, and none is in flight.
        rig.feed(Resumed())
        first, second = rig.of(Launched)
        assert [row[0] for row in first.decodes + second.decodes] == seqs[: len(first.decodes) + len(second.decodes)]
        assert first.num_tokens == sum(most) == 4
        assert len(first.decodes) == len(most)
        assert second.num_tokens <= 4
        rig.finish_all()
        assert len(rig.finished()) == 6


def test_the_more_urgent_of_waiting_and_partial_prefills_goes_first() -> None:
    rig = Rig(max_num_batched_tokens=8)
    long = rig.arrive(30, 2)
    urgent = rig.arrive(3, 2, priority=-1)
    rig.complete()
    launched = launch_of(rig)
    assert launched.chunks == [(urgent, 0, 0, 3, 1), (long, 0, 8, 5, 0)]


def test_a_partial_prefill_goes_on_before_a_later_arrival() -> None:
    rig = Rig(max_num_batched_tokens=8)
    long = rig.arrive(12, 2)
    later = rig.arrive(12, 2)
    rig.complete()
    assert launch_of(rig).chunks == [(long, 0, 8, 4, 1), (later, 0, 0, 4, 0)]


def test_dynamic_keys_order_partial_prefills_anew_each_round() -> None:
    # The second has the shorter deadline: it loses its share of slack faster, and overtakes at a chunk boundary.
    rig = Rig(policy=Lrs(min_deadline_ms=1), max_num_batched_tokens=8)
    patient = rig.arrive(40, 2, deadline_ns=4000 * MILLISECOND)
    hurried = rig.arrive(40, 2, deadline_ns=2000 * MILLISECOND, at=1000 * MILLISECOND)
    rig.complete(at=1001 * MILLISECOND)
    assert rows(launch_of(rig)) == [patient]
    rig.complete(at=2900 * MILLISECOND)
    assert rows(launch_of(rig)) == [hurried]


def test_static_keys_order_the_line_by_deadline() -> None:
    rig = Rig(policy=Edf(), max_num_seqs=1)
    rig.arrive(4, 1, deadline_ns=50 * MILLISECOND)
    later, sooner = rig.arrive_all(
        arrival(4, 1, deadline_ns=300 * MILLISECOND), arrival(4, 1, deadline_ns=100 * MILLISECOND)
    )
    rig.complete()
    assert rows(launch_of(rig)) == [sooner]
    rig.complete()
    assert rows(launch_of(rig)) == [later]


def test_one_that_does_not_fit_is_passed_over_a_bounded_number_of_times() -> None:
    rig = Rig(num_blocks=8, max_model_len=28, max_skips=2)
    rig.arrive(8, 12)  # 3 blocks, and more as it goes on
    big = rig.arrive(24, 1)  # 7 blocks: does not fit beside it
    small = [rig.arrive(1, 1) for _ in range(4)]
    admitted = []
    for _ in range(3):
        rig.complete()
        admitted += [row[0] for row in launch_of(rig).chunks]
    # Its first two passes let others by; then the line is blocked until it fits.
    assert set(admitted) <= set(small)
    assert rig.sequence(big).skips <= 2
    rig.finish_all()
    order = [chunk[0] for found in rig.decisions if isinstance(found, Launched) for chunk in found.chunks]
    assert order.index(big) < order.index(small[-1])
    assert len(rig.finished()) == 6


def test_without_skips_the_line_is_strict() -> None:
    rig = Rig(num_blocks=8, max_model_len=28, max_skips=0)
    rig.arrive(8, 12)
    big, small = rig.arrive(24, 1), rig.arrive(1, 1)
    rig.finish_all()
    order = [chunk[0] for found in rig.decisions if isinstance(found, Launched) for chunk in found.chunks]
    assert order.index(big) < order.index(small)


def test_the_slots_are_a_limit() -> None:
    rig = Rig(max_num_seqs=2)
    seqs = rig.arrive_all(*(arrival(1, 2) for _ in range(5)))
    assert rows(launch_of(rig)) == seqs[:2]
    rig.complete()
    rig.complete()
    assert rows(launch_of(rig)) == seqs[2:4]


def test_a_batcher_sizes_the_chunks() -> None:
    rig = Rig(batcher=Fixed(max_chunk_tokens=3))
    seqs = rig.arrive_all(arrival(7, 1), arrival(2, 1))
    assert launch_of(rig).chunks == [(seqs[0], 0, 0, 3, 0), (seqs[1], 0, 0, 2, 1)]


def test_steps_run_ahead_as_far_as_both_limits_allow() -> None:
    rig = Rig(max_steps_in_flight=3, max_decodes_in_flight_per_seq=2)
    seq = rig.arrive(4, 10)
    first, second = rig.of(Launched)
    assert first.chunks == [(seq, 0, 0, 4, 1)]
    assert second.decodes == [(seq, 0, 4, 1)]  # nothing confirmed yet, one step in flight
    rig.complete()
    assert launch_of(rig).decodes == [(seq, 0, 5, 1)]
    assert rig.sequence(seq).pending_tokens == 2


def test_prompt_chunks_are_bound_by_the_replica_alone() -> None:
    rig = Rig(max_steps_in_flight=4, max_decodes_in_flight_per_seq=1, max_num_batched_tokens=4)
    rig.arrive(16, 2)
    assert [found.chunks[0][2] for found in rig.of(Launched)] == [0, 4, 8, 12]


def test_run_ahead_never_goes_beyond_the_limit() -> None:
    rig = Rig(max_steps_in_flight=4, max_decodes_in_flight_per_seq=4)
    rig.arrive(4, 2)
    assert len(rig.of(Launched)) == 2
    rig.finish_all()
    assert [end[2:] for end in rig.finished()] == [("length", 2)]


def test_nothing_is_planned_after_a_step_that_takes_long() -> None:
    """Whoever comes meanwhile is in the next one, which is planned as soon as that ends."""
    rig = Rig(max_steps_in_flight=3, max_decodes_in_flight_per_seq=3, run_ahead_ms=20)
    # A millisecond for each token of a prompt, and nothing else.
    rig.feed(PredictorSwapped(coefficients=[0, 1_000_000_000, 0, 0, 0]))
    early = rig.arrive(20, 10)
    assert launch_of(rig).predicted_ns == 20 * MILLISECOND
    late = rig.arrive(4, 10)
    assert not rig.of(Launched)
    rig.complete()
    # The next takes less, and others run ahead behind it.
    first, *others = rig.of(Launched)
    assert first.predicted_ns == 4 * MILLISECOND
    assert first.decodes == [(early, 0, 21, 0)]
    assert first.chunks == [(late, 0, 0, 4, 1)]
    assert len(others) == 2
    rig.finish_all()
    assert len(rig.finished()) == 2


def test_a_launch_reserves_for_the_most_and_the_rest_goes_back() -> None:
    rig = Rig(max_tokens_per_row=4)
    seq = rig.arrive(4, 9)
    assert launch_of(rig).most == [4]
    rig.complete(produced=[1])
    launched = launch_of(rig)
    assert launched.most == [4]
    assert launched.num_tokens == 4
    rig.complete(produced=[0])
    assert rig.sequence(seq).num_output_tokens == 1
    rig.complete(produced=[4])
    rig.complete(produced=[2])
    # Nine at most: two are left.
    assert launch_of(rig).most == [2]
    rig.complete(produced=[2])
    assert rig.finished() == [(seq, 0, "length", 9)]


def test_forget_rides_in_the_next_launch() -> None:
    rig = Rig()
    gone = rig.arrive(4, 9)
    rig.complete()
    rig.feed(Cancelled(request=gone))
    stays = rig.arrive(4, 9)
    rig.complete(produced=[1])
    launched = launch_of(rig)
    assert (gone, 0) in launched.forget
    assert rows(launched) == [stays]
    rig.complete()
    assert launch_of(rig).forget == []


def test_predicted_times_are_those_of_the_step() -> None:
    rig = Rig()
    rig.arrive(10, 3)
    prefill = StepShape(prefill_tokens=10, context_tokens=10, chunk_context=50)
    assert launch_of(rig).predicted_ns == rig.state.replicasets[0].predictor.step_ps(prefill) // 1000
    rig.complete()
    decode = StepShape(num_decodes=1, context_tokens=11)
    assert launch_of(rig).predicted_ns == rig.state.replicasets[0].predictor.step_ps(decode) // 1000


def test_with_one_queue_the_replica_with_fewest_tokens_takes_first() -> None:
    rig = Rig(num_replicas=2, max_steps_in_flight=3)
    seqs = [rig.arrive(20, 9), rig.arrive(4, 9), rig.arrive(4, 9), rig.arrive(30, 9)]
    taken = {
        chunk[0]: found.replica for found in rig.decisions if isinstance(found, Launched) for chunk in found.chunks
    }
    assert [taken[seq] for seq in seqs] == [0, 1, 1, 1]
    assert rig.routed() == []


def test_one_that_gives_way_goes_on_at_a_replica_whose_turn_was_over() -> None:
    depth = {"max_steps_in_flight": 2, "max_decodes_in_flight_per_seq": 2}
    rig = Rig(up=False, num_replicas=2, num_blocks=5, max_model_len=16, **depth)
    rig.feed(WorkerUp(replica=0, epoch=1))
    ahead, behind = rig.arrive_all(arrival(4, 6), arrival(4, 12))
    rig.feed(WorkerUp(replica=1, epoch=1))
    while not rig.preempted():
        rig.complete()
    assert rig.preempted() == [(behind, "memory")]
    # The last row of `ahead` is in flight, with the block that `behind` lacks: replica 0 has nothing to launch.
    assert rig.sequence(ahead).in_flight == 1
    assert [(launched.replica, rows(launched)) for launched in rig.of(Launched)] == [(1, [behind])] * 2
    rig.finish_all()
    assert [reason for *_, reason, _ in rig.finished()] == ["length", "length"]


def test_in_a_pipeline_a_step_takes_its_share_of_the_decodes() -> None:
    """Each of 2 stages has a step, and a third one waits for whoever comes."""
    rig = Rig(num_stages=2, max_num_seqs=2)
    seqs = rig.arrive_all(*(arrival(1, 20) for _ in range(5)))
    # A step has 2 rows; as many as two steps have are resident.
    assert [rows(launched) for launched in rig.flying[0]] == [seqs[:2], seqs[2:4]]
    for step in range(6):
        rig.complete()
        assert [rows(launched) for launched in rig.flying[0]] == [seqs[2:4], seqs[:2]][:: 1 - 2 * (step % 2)]
    late = rig.arrive(1, 20)
    assert len(rig.state.replicas[0].running) == 4
    rig.finish_all()
    assert [end[0] for end in rig.finished()] == [*seqs, late]


def test_the_least_urgent_decodes_have_their_turn() -> None:
    rig = Rig(num_stages=2, micro_batches=3)
    seqs = rig.arrive_all(*(arrival(1, 6) for _ in range(6)))
    rig.complete()
    while rig.sequence(seqs[0]).num_output_tokens < 5:
        assert sorted(request for launched in rig.flying[0] for request in rows(launched)) == seqs
        assert [len(launched.decodes) for launched in rig.flying[0]] == [2, 2, 2]
        rig.complete()
    rig.finish_all()
    assert {end[0] for end in rig.finished()} == set(seqs)


def test_chunks_follow_each_other_through_all_stages() -> None:
    rig = Rig(num_stages=3, max_num_batched_tokens=4)
    rig.arrive(40, 2)
    assert [found.chunks[0][2] for found in rig.of(Launched)] == [0, 4, 8, 12]


def test_a_step_that_takes_long_is_waited_for_once_every_stage_has_one() -> None:
    rig = Rig(num_stages=3, max_num_batched_tokens=4, run_ahead_ms=1)
    rig.arrive(40, 2)
    assert len(rig.of(Launched)) == 3
    rig.complete()
    assert len(rig.flying[0]) == 3


def test_in_a_pipeline_dynamic_chunks_take_equally_long() -> None:
    rig = Rig(
        num_stages=2, batcher=Dynamic(target_ms=40), num_blocks=400, max_model_len=1500, max_num_batched_tokens=1024
    )
    # A token takes longer, the more there are before it.
    rig.feed(PredictorSwapped(coefficients=[2_000_000_000, 40_000_000, 0, 0, 200_000]))
    rig.arrive(1000, 1)
    launches = []
    while rig.flying[0]:
        launches.append(rig.flying[0][0])
        rig.complete()
    sizes = [launched.num_tokens for launched in launches]
    times = [launched.predicted_ns for launched in launches]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[-1]
    assert max(times) <= 40 * MILLISECOND
    assert max(times) - min(times) < 0.05 * max(times)


def test_decodes_of_a_pipeline_that_began_apart_come_together_in_equal_steps() -> None:
    rig = Rig(num_stages=2)
    for _ in range(3):
        rig.arrive_all(arrival(4, 30), arrival(4, 30))
    sizes = []
    for _ in range(16):
        rig.complete()
        sizes += [len(launched.decodes) for launched in rig.of(Launched)]
        assert sum(1 for step in rig.state.replicas[0].in_flight if step.decodes) <= 2
    # Three steps of two would go on as they are.
    assert sizes[-4:] == [3, 3, 3, 3]


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 2), (4, 2), (4, 4)])
def test_a_decode_of_a_pipeline_waits_for_no_more_steps_than_there_are_shares(
    num_stages: int, micro_batches: int
) -> None:
    rng = random.Random(num_stages)
    rig = Rig(num_stages=num_stages, micro_batches=micro_batches, num_blocks=400, max_model_len=200, max_num_seqs=16)
    waited: Counter[int] = Counter()
    num_waits = 0
    for number in range(160):
        if number < 120 and rng.random() < 0.3:
            rig.arrive_all(*(arrival(rng.randint(1, 9), rng.randint(1, 40)) for _ in range(rng.randint(1, 3))))
        if not rig.flying[0]:
            continue
        has_decodes = bool(rig.flying[0][0].decodes)
        rig.complete()
        for sequence in rig.state.replicas[0].running:
            if sequence.state is State.DECODE and not sequence.sampling_in_flight:
                waited[sequence.id.request] += has_decodes
                num_waits += has_decodes
                assert waited[sequence.id.request] <= micro_batches
            else:
                del waited[sequence.id.request]
    # Some that are less urgent have.
    assert num_waits
