"""A launch that is computed at once."""

from __future__ import annotations

import pytest

from eventlm.errors import CheckpointError
from eventlm.worker.protocol import StepOutput
from eventlm.worker.runner import AwaitedStep, ExecutedStep, has_rows
from tests.worker.launches import launched


def test_a_step_is_done_when_it_has_begun() -> None:
    output = StepOutput([[7]], [], [], {})
    step = ExecutedStep(lambda: output)
    assert step.is_done()
    assert step.finish() is output
    start_ns, end_ns = step.times_ns
    assert start_ns <= end_ns


def test_what_computing_raises_is_raised() -> None:
    def execute() -> StepOutput:
        raise CheckpointError("no weights")

    with pytest.raises(CheckpointError):
        ExecutedStep(execute)


def test_a_step_that_waits_for_another_rank_is_computed_when_it_is_finished() -> None:
    answers = iter([False, True])
    computed: list[str] = []

    def execute() -> StepOutput:
        computed.append("here")
        return StepOutput([[7]], [], [], {}, stages=[(1, 2), (5, 9)])

    step = AwaitedStep(lambda: next(answers), execute)
    assert [step.is_done(), step.is_done(), computed] == [False, True, []]
    assert step.finish().tokens == [[7]]
    # From the first stage to the last.
    assert step.times_ns == (1, 9)
    without_rows = AwaitedStep(lambda: True, lambda: StepOutput([], [], [], {}))
    without_rows.finish()
    assert 0 < without_rows.times_ns[0] <= without_rows.times_ns[1]


def test_launches_that_only_tell_what_to_forget_have_no_rows() -> None:
    assert not has_rows(launched(0, forget=[(1, 0)]))
    assert has_rows(launched(0, decodes=[(1, 0, 3, 0)]))
    assert has_rows(launched(0, chunks=[(1, 0, 0, 3, 1)]))
