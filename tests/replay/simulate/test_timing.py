"""When steps end: by a cost model, or as in a record."""

from __future__ import annotations

from eventlm.events import Launched
from eventlm.replay.cost.model import LinearCost, Overheads
from eventlm.replay.simulate.timing import ModelledTiming, RecordedTiming, StepTimes


def launch(ts: int, step: int, *, replica: int = 0) -> Launched:
    decodes = [(1, 0, 10, 0)]
    return Launched(s=step, ts=ts, replica=replica, epoch=1, step=step, decodes=decodes, num_tokens=1, predicted_ns=0)


def test_a_step_waits_for_its_launch_and_for_the_one_before() -> None:
    overheads = Overheads(dispatch_ns=5, between_ns=2, report_ns=3, stalls=[(125, 300)])
    timing = ModelledTiming(LinearCost(base_ps=100_000, overheads=overheads), 2)
    assert timing.step(launch(10, 1)) == StepTimes(15, 115, 118, 0)
    # Its completion is due while nothing is applied; the worker goes on meanwhile.
    assert timing.step(launch(20, 2)) == StepTimes(117, 217, 300, 0)
    assert timing.step(launch(20, 3, replica=1)) == StepTimes(25, 125, 300, 0)
    timing.worker_up(0, 150)
    assert timing.step(launch(150, 4)) == StepTimes(155, 255, 300, 0)


def test_what_the_record_does_not_have_never_completes() -> None:
    timing = RecordedTiming([])
    assert timing.step(launch(10, 1)) is None
