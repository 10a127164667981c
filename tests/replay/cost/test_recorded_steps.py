"""Which step shapes a run covers."""

from __future__ import annotations

import pytest

from eventlm.core.predictor import StepShape
from eventlm.replay.cost.recorded_steps import RecordedShapes

SEEN = RecordedShapes([StepShape(0, 8, 1000, 0, 0), StepShape(256, 4, 2000, 30_000, 1)])


@pytest.mark.parametrize(
    ("shape", "is_inside"),
    [
        (StepShape(0, 8, 1000, 0, 0), True),
        (StepShape(0, 12, 700, 0, 0), True),
        (StepShape(0, 31, 1000, 0, 0), True),
        (StepShape(0, 32, 1000, 0, 0), False),
        (StepShape(0, 3, 1000, 0, 0), False),
        (StepShape(0, 8, 5000, 0, 0), False),
        (StepShape(500, 5, 1500, 60_000, 1), True),
        (StepShape(256, 0, 2000, 30_000, 1), False),
        (StepShape(1, 8, 1000, 0, 1), False),
        (StepShape(2048, 4, 2000, 30_000, 1), False),
    ],
)
def test_it_is_about_powers_of_two(shape: StepShape, *, is_inside: bool) -> None:
    assert SEEN.is_inside(shape) == is_inside


def test_no_steps_have_no_shapes() -> None:
    assert not RecordedShapes([]).is_inside(StepShape(0, 1, 1, 0, 0))
