"""A launch that is computed at once."""

from __future__ import annotations

import pytest

from eventlm.errors import CheckpointError
from eventlm.worker.protocol import StepOutput
from eventlm.worker.runner import ExecutedStep


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
