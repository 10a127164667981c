"""When steps end: by a cost model, or as in a record."""

from __future__ import annotations

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.predictor import StepShape
from eventlm.events import Launched
from eventlm.replay.cost.model import LinearCost, Overheads
from eventlm.replay.cost.recorded_steps import RecordedStep
from eventlm.replay.simulate.timing import ModelledTiming, RecordedTiming, SetTiming, StepTimes


def config(num_replicas: int, **groups: int) -> CoreConfig:
    return CoreConfig(models=["m"], num_blocks=8, max_model_len=100, num_replicas=num_replicas, **groups)


def launch(ts: int, step: int, *, replica: int = 0) -> Launched:
    decodes = [(1, 0, 10, 0)]
    return Launched(s=step, ts=ts, replica=replica, epoch=1, step=step, decodes=decodes, num_tokens=1, predicted_ns=0)


def test_a_step_waits_for_its_launch_and_for_the_one_before() -> None:
    overheads = Overheads(dispatch_ns=5, between_ns=2, report_ns=3, stalls=[(125, 300)])
    timing = ModelledTiming([SetTiming(LinearCost(base_ps=100_000, overheads=overheads), config(2))])
    assert timing.step(launch(10, 1)) == StepTimes(15, 115, 118, 0)
    # Its completion is due while nothing is applied; the worker goes on meanwhile.
    assert timing.step(launch(20, 2)) == StepTimes(117, 217, 300, 0)
    assert timing.step(launch(20, 3, replica=1)) == StepTimes(25, 125, 300, 0)
    timing.worker_up(0, 150)
    assert timing.step(launch(150, 4)) == StepTimes(155, 255, 300, 0)


def test_what_the_record_does_not_have_never_completes() -> None:
    timing = RecordedTiming([])
    assert timing.step(launch(10, 1)) is None


def test_a_step_goes_through_all_stages_each_with_one_at_a_time() -> None:
    overheads = Overheads(dispatch_ns=5, between_ns=2, report_ns=3, hand_over_ns=10)
    cost = LinearCost(base_ps=0, decode_ps=300_000, overheads=overheads).in_parts(3, 1)
    timing = ModelledTiming([SetTiming(cost, config(1))])
    first = [(15, 115), (125, 225), (235, 335)]
    assert timing.step(launch(10, 1)) == StepTimes(15, 335, 338, 0, first)
    # Each stage takes it once the one before is through with it, and its own work is done.
    second = [(117, 217), (227, 327), (337, 437)]
    assert timing.step(launch(20, 2)) == StepTimes(117, 437, 440, 0, second)
    timing.worker_up(0, 500)
    assert timing.step(launch(500, 3)) == StepTimes(505, 825, 828, 0, [(505, 605), (615, 715), (725, 825)])


def test_a_long_step_holds_up_those_behind_it_in_every_stage() -> None:
    timing = ModelledTiming([SetTiming(LinearCost(base_ps=0, decode_ps=200_000).in_parts(2, 1), config(1))])
    long = structs.replace(launch(0, 1), decodes=[(1, 0, 10, 0)] * 4)
    assert timing.step(long) == StepTimes(0, 800, 800, 0, [(0, 400), (400, 800)])
    assert timing.step(launch(0, 2)) == StepTimes(400, 900, 900, 0, [(400, 500), (800, 900)])


def test_steps_in_flight_where_a_branch_begins_keep_their_stages() -> None:
    stages = [(0, 100), (150, 250)]
    before = RecordedStep(0, 1, 1, StepShape(), 0, 0, 250, 260, 7, stages)
    timing = ModelledTiming(
        [SetTiming(LinearCost(base_ps=0, decode_ps=200_000).in_parts(2, 1), config(1))], before=[before]
    )
    assert timing.step(launch(0, 1)) == StepTimes(0, 250, 260, 0, stages)
    assert timing.step(launch(0, 2)) == StepTimes(100, 350, 350, 0, [(100, 200), (250, 350)])


def test_a_step_takes_as_long_as_its_slowest_group() -> None:
    cost = LinearCost(base_ps=0, decode_ps=100_000, groups=2).in_parts(2, 2)
    timing = ModelledTiming([SetTiming(cost, config(1, num_kv_groups=2, kv_shard_tokens=32))])
    three = structs.replace(
        launch(0, 1),
        decodes=[(1, 0, 10, 0), (2, 0, 10, 0), (3, 0, 10, 0)],
        blocks=[(0, 0, [1]), (1, 0, [9]), (2, 0, [10])],
    )
    assert timing.step(three) == StepTimes(0, 200, 200, 0, [(0, 100), (100, 200)])
