"""Hits: from the launch that computes a block, at admission and before each chunk, and only what was held."""

from __future__ import annotations

from eventlm.core.state.sequence import State
from eventlm.events import Finished, Launched, Preempted, WorkerUp
from tests.core.rig import Rig, arrival


def chunks_of(rig: Rig, request: int) -> list[tuple[int, int, int]]:
    """(index, start, tokens) of a request's chunks so far."""
    launches = [found for found in rig.decisions if isinstance(found, Launched)]
    return [chunk[1:4] for found in launches for chunk in found.chunks if chunk[0] == request]


def test_a_prompt_is_hit_from_the_launch_that_computes_it() -> None:
    rig = Rig()
    first = rig.arrive(10, 2, blocks=[1, 2])
    second = rig.arrive(10, 2, blocks=[1, 2])  # the first is still in flight
    rig.complete()
    assert chunks_of(rig, second) == [(0, 8, 2)]
    assert rig.sequence(first).block_table[:2] == rig.sequence(second).block_table[:2]
    rig.finish_all()
    cached = {found.request: found.cached_tokens for found in rig.decisions if isinstance(found, Finished)}
    assert cached == {first: 0, second: 8}


def test_equal_prompts_of_one_tick_compute_their_shared_blocks_once() -> None:
    rig = Rig(num_blocks=12, max_model_len=44)
    seqs = rig.arrive_all(*(arrival(10, 2, blocks=[1, 2]) for _ in range(3)))
    (launched,) = rig.of(Launched)
    assert launched.chunks == [(seqs[0], 0, 0, 10, 1), (seqs[1], 0, 8, 2, 1), (seqs[2], 0, 8, 2, 1)]
    # Two shared blocks, and of each its own last one with one more.
    assert rig.state.replicas[0].pool.num_available == 12 - 2 - 3 * 1
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_samples_of_one_prompt_share_it() -> None:
    rig = Rig()
    seq = rig.arrive(9, 3, blocks=[1, 2], n=3)
    assert chunks_of(rig, seq) == [(0, 0, 9), (1, 8, 1), (2, 8, 1)]
    tables = [rig.sequence(seq, index).block_table for index in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3


def test_hits_end_before_the_last_prompt_token() -> None:
    rig = Rig()
    rig.arrive(8, 2, blocks=[1, 2])
    rig.finish_all()
    again = rig.arrive(8, 2, blocks=[1, 2])
    # The second block could be hit whole, but then nothing would be left to sample from.
    assert chunks_of(rig, again) == [(0, 4, 4)]


def test_reserved_blocks_are_exchanged_for_those_that_became_hittable() -> None:
    rig = Rig(max_num_batched_tokens=8, max_steps_in_flight=1)
    first, second = rig.arrive_all(arrival(14, 2, blocks=[1, 2, 3]), arrival(14, 2, blocks=[1, 2, 3]))
    # The second is admitted in the next step, and hits two blocks; the third is launched in that very step.
    rig.complete()
    assert chunks_of(rig, first) == [(0, 0, 8), (0, 8, 6)]
    before = rig.state.replicas[0].pool.num_available
    assert chunks_of(rig, second) == [(0, 12, 2)]
    assert rig.sequence(second).block_table[:3] == rig.sequence(first).block_table[:3]
    assert before == 32 - 3 - 1 - 1
    rig.finish_all()
    assert len(rig.finished()) == 2


def test_a_half_done_prompt_skips_past_what_another_has_computed_meanwhile() -> None:
    rig = Rig(max_num_batched_tokens=6)
    patient = rig.arrive(22, 2, blocks=[1, 2, 3, 4, 5], priority=1)
    assert chunks_of(rig, patient) == [(0, 0, 6)]
    hurried = rig.arrive(22, 2, blocks=[1, 2, 3, 4, 5])
    table = rig.sequence(patient).block_table[:]
    rig.finish_all()
    starts = [start for _, start, _ in chunks_of(rig, patient)]
    # Both meet in the same blocks: nothing was computed twice behind the first chunk's block.
    assert table[0] in table
    computed = sum(num_tokens for seq in (patient, hurried) for _, _, num_tokens in chunks_of(rig, seq))
    assert computed <= 22 + 6 + 2
    assert starts == sorted(starts)
    assert rig.state.replicas[0].pool.num_available == 32


def test_a_request_may_refuse_to_be_served_from_the_cache() -> None:
    rig = Rig()
    rig.arrive(10, 2, blocks=[1, 2])
    rig.finish_all()
    fresh = rig.arrive(10, 2, blocks=[1, 2], skip_cache_read=True)
    assert chunks_of(rig, fresh) == [(0, 0, 10)]
    rig.finish_all()
    assert chunks_of(rig, rig.arrive(10, 2, blocks=[1, 2])) == [(0, 8, 2)]


def test_generated_blocks_are_hit_once_the_step_that_stores_them_is_done() -> None:
    rig = Rig()
    seq = rig.arrive(3, 8)
    rig.complete()  # the chunk: 3 tokens stored, the first sampled
    early = rig.arrive(9, 1, blocks=[7, 8])
    assert rig.sequence(early).state is State.WAITING
    rig.complete(filled=[(0, [7])])  # the fourth token's KV fills the first block
    assert chunks_of(rig, early) == [(0, 4, 5)]
    assert rig.sequence(early).block_table[0] == rig.sequence(seq).block_table[0]


def test_a_block_filled_before_a_preemption_does_not_enter_after_it() -> None:
    rig = Rig(max_num_seqs=1, max_steps_in_flight=1)
    victim = rig.arrive(3, 8)
    rig.complete()
    urgent = rig.arrive(1, 1, priority=-1)
    # The step in flight stores what fills block 7, but completes when its sequence has been thrown out and back in.
    completion = rig.completion(filled=[(0, [7])])
    rig.feed(completion)
    assert rig.preempted() == [(victim, "admission")]
    assert 7 in rig.state.replicas[0].pool.tree
    rig.finish_all()
    assert {end[0] for end in rig.finished()} == {victim, urgent}


def test_what_was_not_held_without_a_break_stays_out_of_the_tree() -> None:
    rig = Rig(max_num_seqs=1, max_steps_in_flight=2, max_num_batched_tokens=4)
    victim = rig.arrive(3, 20)
    rig.complete()
    # One decode is in flight when the urgent one evicts its sequence at the next plan.
    completion = rig.completion(filled=[(0, [7])])
    rig.arrive(1, 1, priority=-1)
    assert rig.preempted() == [(victim, "admission")]
    rig.feed(completion)
    assert 7 not in rig.state.replicas[0].pool.tree
    assert rig.sequence(victim).block_names == [7]
    assert rig.sequence(victim).num_output_tokens == 2


def test_a_lost_worker_empties_its_cache() -> None:
    rig = Rig()
    rig.arrive(10, 2, blocks=[1, 2])
    rig.finish_all()
    rig.lose()
    rig.feed(WorkerUp(replica=0, epoch=2))
    assert chunks_of(rig, rig.arrive(10, 2, blocks=[1, 2])) == [(0, 0, 10)]


def test_a_worker_forgets_preempted_and_finished_sequences() -> None:
    rig = Rig(num_blocks=8, max_model_len=32)
    first = rig.arrive(8, 20, blocks=[1, 2])
    second = rig.arrive(8, 20, blocks=[3, 4])
    rig.finish_all()
    assert len(rig.finished()) == 2
    preempted = [(found.request, found.index) for found in rig.decisions if isinstance(found, Preempted)]
    assert preempted
    forgotten = [tuple(id_) for found in rig.decisions if isinstance(found, Launched) for id_ in found.forget]
    # The last to end is told of with a launch that has not come yet.
    ended = [(found.request, found.index) for found in rig.decisions if isinstance(found, Finished)]
    assert {first, second} == {request for request, _ in ended}
    assert sorted(forgotten) == sorted([*preempted, *ended[:-1]])
