"""Who kills worker after worker ends; who was beside it, or only unlucky, does not."""

from __future__ import annotations

import pytest

from eventlm.core.state import Suspect
from eventlm.events import Launched, WorkerUp
from eventlm.types import SequenceId
from tests.core.rig import Rig, arrival, rows


def lose_again(rig: Rig, times: int = 1) -> None:
    """The worker dies in its oldest step, and another comes up."""
    for _ in range(times):
        epoch = rig.state.replicas[0].epoch
        rig.lose(0, epoch)
        rig.feed(WorkerUp(replica=0, epoch=epoch + 1))


def run_with_poison(rig: Rig, poison: int, max_steps: int = 200) -> None:
    """Complete steps, but for those with a row of `poison`: in these the worker dies."""
    for _ in range(max_steps):
        if not rig.flying[0]:
            return
        if poison in rows(rig.flying[0][0]):
            lose_again(rig)
        else:
            rig.complete()
    raise AssertionError("the poison was never given up")


@pytest.mark.parametrize("max_losses", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 4}, {"max_num_seqs": 2}, {"num_blocks": 9}])
def test_the_poison_ends_and_who_was_beside_it_does_not(max_losses: int, limits: dict[str, int]) -> None:
    rig = Rig(max_losses=max_losses, **{"max_model_len": 32} | limits)
    seqs = [rig.arrive(10, 6) for _ in range(5)]
    for _ in range(6):
        rig.complete()
    poison = seqs[2]
    tokens = rig.sequence(poison).num_output_tokens
    run_with_poison(rig, poison)
    ends = {request: (reason, position) for request, _, reason, position in rig.finished()}
    assert ends.pop(poison) == ("error", tokens)
    if max_losses > 1:
        assert set(ends.values()) == {("length", 6)}
    assert rig.state.suspects == {}


def test_a_suspect_is_tried_alone() -> None:
    rig = Rig(max_losses=4, max_steps_in_flight=2)
    first, second, third = rig.arrive_all(arrival(4, 6), arrival(4, 6), arrival(4, 6))
    lose_again(rig)
    assert {suspect.losses for suspect in rig.state.suspects.values()} == {1}
    assert rows(rig.of(Launched)[0]) == [first, second, third]
    lose_again(rig)
    assert [rows(launched) for launched in rig.of(Launched)] == [[first]]
    rig.complete()
    assert [rows(launched) for launched in rig.of(Launched)] == [[second]]
    # The death of a worker now is held against nobody else.
    lose_again(rig)
    assert rig.state.suspects == {SequenceId(second, 0): Suspect(3, 0, 4), SequenceId(third, 0): Suspect(2, 0, 4)}
    assert [rows(launched) for launched in rig.of(Launched)] == [[second]]
    lose_again(rig)
    assert rig.finished() == [(second, 0, "error", 0)]
    rig.finish_all()
    assert sorted(rig.finished()) == [(first, 0, "length", 6), (second, 0, "error", 0), (third, 0, "length", 6)]


def test_progress_clears_a_suspect() -> None:
    rig = Rig(max_losses=2)
    seq = rig.arrive(4, 20)
    for _ in range(8):
        lose_again(rig)
        assert rig.state.suspects[SequenceId(seq, 0)].losses == 1
        rig.complete()
        assert rig.state.suspects == {}
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
        assert rig.state.suspects == {SequenceId(seq, 0): Suspect(1, start, start + 8)}
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 2)]


def test_getting_half_of_the_way_again_clears_nobody() -> None:
    rig = Rig(max_losses=3, max_num_batched_tokens=8)
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
    assert list(rig.state.suspects) == [SequenceId(first, 0)]


def test_with_0_nobody_is_ever_given_up() -> None:
    rig = Rig(max_losses=0)
    seq = rig.arrive(4, 6)
    lose_again(rig, 30)
    assert rig.state.suspects == {}
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 6)]


def test_the_digest_tells_suspects_apart() -> None:
    rigs = [Rig(max_losses=limit) for limit in (0, 4)]
    for rig in rigs:
        rig.arrive(4, 6)
        lose_again(rig)
    digests = [rig.core.digests() for rig in rigs]
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == {"queue"}
