"""What a completion says of its worker's time."""

from __future__ import annotations

from eventlm.events import StepCompleted


def test_a_pipeline_is_as_busy_as_its_slowest_stage() -> None:
    done = StepCompleted(replica=0, epoch=1, step=3, start_ns=100, end_ns=190, produced=[])
    assert (done.busy_ns, done.freed_ns) == (90, 190)
    split = StepCompleted(
        replica=0, epoch=1, step=3, start_ns=100, end_ns=190, produced=[], stages=[(100, 120), (130, 170), (170, 190)]
    )
    assert (split.busy_ns, split.freed_ns) == (40, 120)
