"""A rank's place in the pipeline."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from eventlm.worker.ranks.hand_over import HandedOver
from eventlm.worker.ranks.stage import Stage


class Link:
    """Between two stages of one thread."""

    def __init__(self) -> None:
        self.steps: deque[HandedOver] = deque()

    def send(self, handed: HandedOver) -> None:
        self.steps.append(handed)

    def wait(self, timeout_s: float) -> bool:
        return bool(self.steps)

    def take(self) -> HandedOver:
        return self.steps.popleft()


def three_stages() -> tuple[Stage, Stage, Stage, Link, Link]:
    early, late = Link(), Link()
    stages = [Stage(4, torch.bfloat16, *links) for links in ((None, early), (early, late), (late, None))]
    return (*stages, early, late)  # type: ignore[return-value]


def test_a_step_goes_through_all_stages() -> None:
    first, second, third, _, late = three_stages()
    assert [(each.is_first, each.is_last) for each in (first, second, third)] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert first.has_input()
    assert not second.has_input()
    was_waiting = second.is_waiting
    given = first.begin(7, 2)
    assert given.residual_TH is None
    first.end(7, given, torch.ones(2, 4))
    assert second.has_input()
    assert (was_waiting, second.is_waiting) == (True, False)
    given = second.begin(7, 2)
    assert given.residual_TH is not None
    second.end(7, given, given.residual_TH + 1)
    assert len(late.steps[0].times_ns) == 2
    given = third.begin(7, 2)
    assert given.residual_TH is not None
    assert given.residual_TH.eq(2).all()
    times = third.times_ns(given)
    assert len(times) == 3
    assert [time_ns for both in times for time_ns in both] == sorted(time_ns for both in times for time_ns in both)


@pytest.mark.parametrize(("step", "num_tokens"), [(8, 2), (7, 3)])
def test_another_step_than_was_launched_is_an_error(step: int, num_tokens: int) -> None:
    first, second, *_ = three_stages()
    first.end(7, first.begin(7, 2), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=f"step {step} of {num_tokens} tokens got step 7 of 2 from the stage before"):
        second.begin(step, num_tokens)


def test_alone_a_stage_needs_no_other() -> None:
    _, second, _, early, late = three_stages()
    with second.alone():
        given = second.begin(0, 3)
        assert given.residual_TH is not None
        assert given.residual_TH.dtype == torch.bfloat16
        assert not torch.equal(given.residual_TH[0], given.residual_TH[1])
        second.end(0, given, given.residual_TH)
    assert not late.steps
    early.send(HandedOver(1, ((0, 1),), torch.ones(1, 4)))
    assert second.begin(1, 1).times_ns == ((0, 1),)


def test_a_model_in_one_piece_has_no_times_of_stages() -> None:
    stage = Stage(4, torch.float32)
    assert (stage.is_first, stage.is_last) == (True, True)
    assert stage.times_ns(stage.begin(0, 1)) == ()
