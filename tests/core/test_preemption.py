"""Who is evicted at admission, who is preempted for memory, in which order, and how often."""

from __future__ import annotations

from eventlm.events import Launched, Preempted
from eventlm.policies.edf import Edf
from tests.core.rig import MILLISECOND, Rig, arrival, rows

SECOND = 1000 * MILLISECOND


def test_a_higher_priority_evicts_for_blocks_under_every_policy() -> None:
    rig = Rig(num_blocks=8, max_model_len=28)
    first = rig.arrive(8, 8)
    second = rig.arrive(12, 8)
    rig.complete()
    urgent = rig.arrive(14, 2, priority=-1)
    rig.complete()
    # The later arrival goes; that is enough.
    (evicted,) = rig.of(Preempted)
    assert (evicted.request, evicted.reason, evicted.by) == (second, "admission", (urgent, 0))
    assert rows(rig.of(Launched)[0]) == [first, urgent]
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_a_higher_priority_evicts_for_a_slot() -> None:
    # One engine could only preempt for blocks; its urgent requests waited for slots.
    rig = Rig(max_num_seqs=2)
    rig.arrive(4, 30)
    second = rig.arrive(4, 30)
    rig.complete()
    urgent = rig.arrive(4, 2, priority=-1)
    rig.complete()
    assert rig.preempted() == [(second, "admission")]
    assert urgent in rows(rig.of(Launched)[0])


def test_evictions_are_all_or_nothing() -> None:
    rig = Rig(num_blocks=8, max_model_len=28)
    rig.arrive(16, 4, priority=-5)
    rig.arrive(4, 4)
    rig.complete()
    # It would need 7 blocks; evicting the one below it frees 2 of those that lack.
    rig.arrive(24, 1, priority=-1)
    rig.complete()
    assert rig.preempted() == []
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_fcfs_never_evicts_within_a_priority() -> None:
    rig = Rig(num_blocks=6, max_model_len=20, max_num_seqs=1)
    rig.arrive(4, 8, deadline_ns=100 * SECOND)
    rig.arrive(4, 8, deadline_ns=1)
    rig.complete()
    rig.complete()
    assert rig.preempted() == []


def test_edf_evicts_by_more_than_its_margin() -> None:
    for difference_ns, evicts in ((SECOND, False), (SECOND + 1, True)):
        rig = Rig(policy=Edf(evict_margin_ms=1000), max_num_seqs=1)
        patient = rig.arrive(4, 30, deadline_ns=10 * SECOND, at=2 * MILLISECOND)
        rig.complete(at=3 * MILLISECOND)
        # Its deadline passes earlier by the difference, although it comes two milliseconds later.
        rig.arrive(4, 2, deadline_ns=10 * SECOND - difference_ns - 2 * MILLISECOND, at=4 * MILLISECOND)
        rig.complete()
        assert rig.preempted() == ([(patient, "admission")] if evicts else [])


def test_one_evicted_r_times_since_its_last_token_is_exempt() -> None:
    rig = Rig(max_num_seqs=1, max_evictions=2, max_num_batched_tokens=4)
    victim = rig.arrive(40, 4)
    tokens_at_eviction = []
    for _ in range(4):
        rig.arrive(1, 1, priority=-1)
        num_evictions = len(rig.preempted())
        while len(rig.preempted()) == num_evictions:
            rig.complete()
        tokens_at_eviction.append(rig.sequence(victim).num_output_tokens)
        rig.complete()
    # The third had to wait until the victim had produced a token.
    assert tokens_at_eviction == [0, 0, 1, 1]
    rig.finish_all()
    assert len(rig.finished()) == 5


def test_a_token_makes_one_evictable_again() -> None:
    rig = Rig(max_num_seqs=1, max_evictions=1)
    victim = rig.arrive(4, 20)
    for _ in range(3):
        rig.complete()
        rig.complete()
        rig.arrive(1, 1, priority=-1)
        rig.complete()
    assert rig.preempted() == [(victim, "admission")] * 3
    rig.finish_all()
    assert len(rig.finished()) == 4


def test_a_token_that_was_in_flight_counts() -> None:
    rig = Rig(max_num_seqs=1, max_evictions=1, max_steps_in_flight=2)
    victim = rig.arrive(4, 20)
    rig.complete()
    rig.arrive(1, 1, priority=-1)
    assert rig.sequence(victim).evictions == 1
    rig.complete()
    assert rig.sequence(victim).num_output_tokens == 2
    assert rig.sequence(victim).evictions == 0


def tight() -> tuple[Rig, list[int]]:
    """Three sequences of which each took 2 blocks of 6, in order of arrival; at their fifth token they need more."""
    rig = Rig(num_blocks=6, max_model_len=20)
    seqs = rig.arrive_all(*(arrival(4, 12) for _ in range(3)))
    for _ in range(5):
        rig.complete()
    return rig, seqs


def test_memory_is_taken_from_the_least_urgent() -> None:
    rig, (first, second, third) = tight()
    # The first needs a third block: the last goes, and the second takes its other block.
    assert rig.preempted() == [(third, "memory")]
    (preempted,) = [found for found in rig.decisions if isinstance(found, Preempted)]
    assert preempted.by == (first, 0)
    assert rows(rig.flying[0][0]) == [first, second]
    assert rig.sequence(third).num_output_tokens == 5
    rig.finish_all()
    # Emitted tokens are kept: everybody ends with twelve.
    assert sorted(rig.finished()) == [(seq, 0, "length", 12) for seq in (first, second, third)]


def test_partial_prefills_go_before_decodes_however_urgent() -> None:
    rig = Rig(num_blocks=9, max_model_len=32, max_num_batched_tokens=3)
    grower = rig.arrive(4, 12, priority=-1)
    rig.complete()
    rig.complete()
    decode = rig.arrive(1, 24, priority=1)
    rig.complete()
    partial = rig.arrive(16, 2)
    while not rig.preempted():
        rig.complete()
    assert rig.preempted() == [(partial, "memory")]
    (preempted,) = rig.of(Preempted)
    assert preempted.by == (grower, 0)
    assert rig.sequence(decode).resident
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_the_least_urgent_is_preempted_itself() -> None:
    rig = Rig(num_blocks=6, max_model_len=20)
    first, second = rig.arrive_all(arrival(9, 7), arrival(4, 8))
    while not rig.preempted():
        rig.complete()
    assert rig.preempted() == [(second, "memory")]
    (preempted,) = rig.of(Preempted)
    assert preempted.by is None
    rig.finish_all()
    assert sorted(rig.finished()) == [(first, 0, "length", 7), (second, 0, "length", 8)]


def test_the_preempted_start_over_with_what_they_had() -> None:
    rig, (_, _, third) = tight()
    sequence = rig.sequence(third)
    # Freed KV is not counted as processed.
    assert (sequence.launched_tokens, sequence.block_table, sequence.view.done_tokens) == (0, [], 0)
    assert sequence.view.prompt_tokens == sequence.num_tokens == 9
    rig.finish_all()
    chunks = [
        chunk for found in rig.decisions if isinstance(found, Launched) for chunk in found.chunks if chunk[0] == third
    ]
    assert chunks[0] == (third, 0, 0, 4, 1)
    assert chunks[1][2:] == (0, 9, 1)


def test_preemption_ends() -> None:
    # One engine reached 102,000 preemptions and no completion.
    rig = Rig(num_blocks=6, max_model_len=20, max_num_seqs=4, max_steps_in_flight=2, max_decodes_in_flight_per_seq=2)
    rig.arrive_all(*(arrival(4, 16) for _ in range(12)))
    rig.finish_all(2000)
    assert [end[2:] for end in rig.finished()] == [("length", 16)] * 12
    assert len(rig.preempted()) < 12 * 6


def test_the_preempted_do_not_starve_behind_new_arrivals() -> None:
    rig, (first, second, third) = tight()
    late = [rig.arrive(4, 12) for _ in range(10)]
    rig.finish_all()
    # It keeps its place in the order of arrival.
    order = [end[0] for end in rig.finished()]
    assert order[:3] == [first, second, third]
    assert sorted(order[3:]) == late
