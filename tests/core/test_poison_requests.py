"""A sequence that kills every worker ends; others beside it, or with bad luck, do not."""

from __future__ import annotations

import random

import pytest

from eventlm.core.state.replicaset import LossCounts, Suspect
from eventlm.events import Desynced, Launched, WorkerLost, WorkerUp
from eventlm.types import SequenceId
from tests.core.rig import Rig, arrival, rows

#: The first three requests of a rig, and what is held against one whose prompt of 4 tokens was in flight.
SEQS = (2, 5, 8)
IN_PROMPT = Suspect(1, 0, 0, 4)


def lose_again(rig: Rig, times: int = 1, *, crashed: bool = False) -> None:
    """The worker dies in its oldest step, and another comes up."""
    for _ in range(times):
        epoch = rig.state.replicas[0].epoch
        rig.flying[0].clear()
        rig.feed(WorkerLost(replica=0, epoch=epoch, crashed=crashed))
        rig.feed(WorkerUp(replica=0, epoch=epoch + 1))


def run_with_poison(rig: Rig, *poison: int, crashed: bool = False, max_steps: int = 400) -> int:
    """Complete steps, except those with a row of `poison`: in these the worker dies. Returns how many died."""
    num_losses = 0
    for _ in range(max_steps):
        if not rig.flying[0]:
            return num_losses
        if set(poison) & set(rows(rig.flying[0][0])):
            lose_again(rig, crashed=crashed)
            num_losses += 1
        else:
            rig.complete()
    raise AssertionError("the poison never ended")


def after_steps(rig: Rig, num_steps: int) -> Rig:
    """As if so many steps had completed, and no worker been lost."""
    rig.state.replicasets[0].losses = LossCounts(num_steps=num_steps)
    return rig


@pytest.mark.parametrize("max_losses", [1, 2, 3, 5])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 4}, {"max_num_seqs": 2}, {"num_blocks": 9}])
def test_the_poison_ends_and_those_beside_it_do_not(max_losses: int, limits: dict[str, int]) -> None:
    rig = Rig(max_losses=max_losses, **{"max_model_len": 32} | limits)
    seqs = [rig.arrive(10, 6) for _ in range(5)]
    for _ in range(6):
        rig.complete()
    poison = seqs[2]
    tokens = rig.sequence(poison).num_output_tokens
    run_with_poison(rig, poison)
    ends = {request: (reason, position) for request, _, reason, position in rig.finished()}
    assert ends.pop(poison) == ("error", tokens)
    assert set(ends.values()) == {("length", 6)}
    assert rig.state.replicasets[0].suspects == {}


@pytest.mark.parametrize(
    ("num_steps", "crashed", "num_losses"),
    # A first request has nothing to be compared with. Otherwise the first loss is one that had to hit some step.
    [(0, False, 5), (0, True, 3), (400, False, 4), (400, True, 3), (120_000, False, 3), (120_000, True, 2)],
)
def test_the_fewer_workers_are_lost_otherwise_the_sooner_one_is_condemned(
    num_steps: int, crashed: bool, num_losses: int
) -> None:
    alone = after_steps(Rig(max_losses=5), num_steps)
    assert run_with_poison(alone, alone.arrive(), crashed=crashed) == max(num_losses - bool(num_steps), 2)
    assert alone.state.replicasets[0].losses == LossCounts(num_steps=num_steps)
    if num_steps:
        beside = after_steps(Rig(max_losses=5), num_steps)
        poison, *_ = beside.arrive_all(*(arrival() for _ in range(6)))
        assert run_with_poison(beside, poison, crashed=crashed) == num_losses


def test_a_suspect_is_tried_alone_and_those_lost_alone_come_last() -> None:
    rig = Rig(max_losses=4, max_steps_in_flight=2)
    first, second, third = rig.arrive_all(arrival(4, 6), arrival(4, 6), arrival(4, 6))
    lose_again(rig)
    assert list(rig.state.replicasets[0].suspects.values()) == [Suspect(1, 0, 0, 4)] * 3
    assert [rows(launched) for launched in rig.of(Launched)] == [[first]]
    rig.complete()
    assert [rows(launched) for launched in rig.of(Launched)] == [[second]]
    # The death of a worker now is held against nobody else.
    lose_again(rig)
    assert list(rig.state.replicasets[0].suspects.items()) == [
        (SequenceId(third, 0), Suspect(1, 0, 0, 4)),
        (SequenceId(second, 0), Suspect(2, 1, 0, 4)),
    ]
    # All suspects are held back until something has completed, and those lost alone come last.
    for computed in (first, third):
        assert [rows(launched) for launched in rig.of(Launched)] == [[computed]]
        rig.complete()
    assert [rows(launched) for launched in rig.of(Launched)] == [[second]]
    run_with_poison(rig, second)
    assert sorted(rig.finished()) == [(first, 0, "length", 6), (second, 0, "error", 0), (third, 0, "length", 6)]


def test_many_poison_requests_among_hundreds_end_one_by_one() -> None:
    rig = Rig(max_losses=5, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512, max_queue_len=1000)
    seqs = rig.arrive_all(*(arrival(6, 4) for _ in range(300)))
    poison = seqs[::60]
    run_with_poison(rig, *poison, max_steps=2000)
    ends = {request: reason for request, _, reason, _ in rig.finished()}
    assert [seq for seq in seqs if ends[seq] == "error"] == poison
    assert len(ends) == 300


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 4}, {"num_blocks": 12, "max_model_len": 44}])
def test_while_many_poison_requests_come_at_once_the_others_make_progress(limits: dict[str, int]) -> None:
    rig = Rig(max_losses=5, max_queue_len=1000, **limits)
    poison = rig.arrive_all(*(arrival(6, 4) for _ in range(12)))
    good = rig.arrive_all(*(arrival(6, 20) for _ in range(40)))
    longest = 0
    for _ in range(2000):
        if set(good) <= {end[0] for end in rig.finished()}:
            break
        if set(poison) & set(rows(rig.flying[0][0])):
            lose_again(rig)
        else:
            rig.complete()
        longest = max(longest, rig.state.replicasets[0].losses.in_a_row)
    assert {request: reason for request, _, reason, _ in rig.finished() if request in good} == dict.fromkeys(
        good, "length"
    )
    # The engine gives a replica up after six.
    assert longest <= 5


def test_where_every_step_fails_the_workers_are_at_fault() -> None:
    rig = Rig(max_losses=5)
    rig.arrive_all(*(arrival() for _ in range(6)))
    # The engine gives its replica up after six losses in a row; later each of them has been lost alone often enough.
    lose_again(rig, 6)
    assert rig.finished() == []


@pytest.mark.parametrize("chance", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("crashed", [False, True])
def test_workers_that_die_at_random_condemn_no_request(chance: float, crashed: bool) -> None:
    num_losses = 0
    for seed in range(40):
        rng = random.Random(seed)
        rig = Rig(max_losses=5, num_blocks=64, max_num_batched_tokens=16, max_steps_in_flight=rng.choice([1, 2]))
        # Some steps before the first death, as a start's own.
        for _ in range(rng.choice([1, 6, 12])):
            rig.arrive(rng.randint(1, 30), rng.randint(2, 20))
        while rig.flying[0]:
            if rng.random() < chance:
                lose_again(rig, crashed=crashed and rng.random() < 0.3)
                num_losses += 1
            else:
                rig.complete()
        assert {reason for _, _, reason, _ in rig.finished()} == {"length"}, f"seed {seed}"
    assert num_losses > 25


def test_progress_clears_a_suspect() -> None:
    rig = Rig(max_losses=2)
    seq = rig.arrive(4, 20)
    for _ in range(8):
        lose_again(rig)
        assert rig.state.replicasets[0].suspects[SequenceId(seq, 0)].losses == 1
        rig.complete()
        assert rig.state.replicasets[0].suspects == {}
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 20)]


def test_losses_at_different_places_of_a_long_prompt_are_no_pattern() -> None:
    rig = Rig(max_losses=2, max_num_batched_tokens=8)
    seq = rig.arrive(80, 2)
    for num_chunks in (7, 2, 5, 0, 8):
        for _ in range(num_chunks):
            rig.complete()
        lose_again(rig)
        start = 8 * num_chunks
        assert rig.state.replicasets[0].suspects == {SequenceId(seq, 0): Suspect(1, 1, start, start + 8)}
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 2)]


def test_getting_halfway_again_clears_no_suspect() -> None:
    rig = after_steps(Rig(max_losses=9, max_num_batched_tokens=8), 400)
    seq = rig.arrive(24, 2)
    for _ in range(3):
        rig.complete()
        rig.complete()
        lose_again(rig)
    assert rig.finished() == [(seq, 0, "error", 0)]


def test_only_the_oldest_step_is_suspected() -> None:
    rig = Rig(max_losses=3, max_steps_in_flight=2, max_num_batched_tokens=4)
    first, second = rig.arrive(4, 4), rig.arrive(4, 4)
    assert [rows(launched) for launched in rig.flying[0]] == [[first], [second]]
    rig.lose()
    # It was not alone: the worker may have died in the second step.
    assert rig.state.replicasets[0].suspects == {SequenceId(first, 0): Suspect(1, 0, 0, 4)}


def test_with_0_no_request_is_ever_given_up() -> None:
    rig = Rig(max_losses=0)
    seq = rig.arrive(4, 6)
    lose_again(rig, 30)
    assert rig.state.replicasets[0].suspects == {}
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 6)]


def test_old_losses_count_less() -> None:
    rig = Rig(max_losses=5)
    rig.state.replicasets[0].losses = LossCounts(num_steps=(1 << 17) - 1, num_losses=8)
    rig.arrive(4, 6)
    rig.complete()
    assert rig.state.replicasets[0].losses == LossCounts(num_steps=1 << 16, num_losses=4)


def test_the_digest_tells_suspects_apart() -> None:
    rigs = [Rig(max_losses=limit) for limit in (0, 4)]
    for rig in rigs:
        rig.arrive(4, 6)
        lose_again(rig)
    digests = [rig.core.digests() for rig in rigs]
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == {"queue"}


def test_the_suspects_are_those_of_the_step_that_the_lost_rank_had_in_hand() -> None:
    def suspects_after(loss: WorkerLost | Desynced) -> dict[SequenceId, Suspect]:
        rig = Rig(max_losses=3, num_stages=2, max_num_batched_tokens=4)
        assert tuple(rig.arrive(4, 4) for _ in range(3)) == SEQS
        assert [rows(launched) for launched in rig.flying[0]] == [[seq] for seq in SEQS]
        rig.flying[0].clear()
        rig.feed(loss)
        return rig.state.replicasets[0].suspects

    assert suspects_after(WorkerLost(replica=0, epoch=1, rank=1, step=1)) == {SequenceId(SEQS[1], 0): IN_PROMPT}
    assert suspects_after(Desynced(replica=0, epoch=1, rank=0, step=2)) == {SequenceId(SEQS[2], 0): IN_PROMPT}
    # One that is not in flight, or of one process alone: the oldest.
    assert suspects_after(WorkerLost(replica=0, epoch=1, rank=1, step=9)) == {SequenceId(SEQS[0], 0): IN_PROMPT}
    assert suspects_after(Desynced(replica=0, epoch=1, step=2)) == {SequenceId(SEQS[0], 0): IN_PROMPT}


def test_a_decode_behind_others_is_suspected_of_its_own_token() -> None:
    rig = Rig(max_losses=3, max_steps_in_flight=3, max_decodes_in_flight_per_seq=3)
    first = rig.arrive(4, 6)
    assert [rows(launched) for launched in rig.flying[0]] == [[first]] * 3
    rig.flying[0].clear()
    rig.feed(WorkerLost(replica=0, epoch=1, rank=1, step=2))
    # The prompt and two tokens, if the steps before had been answered.
    assert rig.state.replicasets[0].suspects == {SequenceId(first, 0): Suspect(1, 1, 3, 6)}
    # The next worker gets as far, with nothing else in flight.
    second = rig.arrive(4, 4)
    rig.feed(WorkerUp(replica=0, epoch=2))
    while rig.state.replicasets[0].suspects:
        if first in rows(rig.flying[0][0]):
            assert [rows(launched) for launched in rig.flying[0]] == [[first]]
        rig.complete()
    rig.finish_all()
    assert rig.finished() == [(second, 0, "length", 4), (first, 0, "length", 6)]
