"""What steps cost in each replicaset: given models, fitted ones, and sets that did nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.cost.recorded_steps import RecordedShapes
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.what_if.costs import NUM_DRAWS, LooksAtShapes, draw_costs, given_costs, shapes_of_sets
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from tests.replay.made_workloads import COST
from tests.replay.replicaset_runs import SLOW, made_sets

SHAPE = StepShape(prefill_tokens=100, num_decodes=4, context_tokens=900)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return read_run(made_sets(tmp_path_factory.mktemp("runs")))


def test_each_replicaset_is_fitted_to_its_own_steps(run: RecordedRun) -> None:
    draws, fits = draw_costs(run, [None, None], follows_run=False)
    assert len(draws) == NUM_DRAWS
    fast_ns, slow_ns = (cost.step_ns(SHAPE, 0, 0) for cost in draws[0])
    assert fast_ns == pytest.approx(COST.step_ns(SHAPE, 0, 0), rel=0.1)
    assert slow_ns == pytest.approx(SLOW.step_ns(SHAPE, 0, 0), rel=0.1)
    assert [fit is not None and fit.num_steps > 20 for fit in fits] == [True, True]


def test_a_model_that_is_given_for_one_set_leaves_the_other(run: RecordedRun) -> None:
    given = given_costs(run.header, None, {"small": COST})
    assert given == [None, COST]
    draws, fits = draw_costs(run, given, follows_run=False)
    assert [[type(cost) for cost in each] for each in draws] == [[type(COST)] * 2] * NUM_DRAWS
    assert (fits[0] is not None, fits[1]) == (True, None)
    assert all(structs.replace(each[1], seed=0) == COST for each in draws)
    assert given_costs(run.header, SLOW, {"main": COST}) == [COST, SLOW]
    with pytest.raises(UsageError, match=r"--replicaset smal: the run has no .*main \(made\), small \(other\)"):
        given_costs(run.header, None, {"smal": COST})


def test_a_roofline_model_has_the_ranks_of_its_set(run: RecordedRun) -> None:
    config = {"replicasets": {"small": {"tensor_parallel_size": 2}}}
    split = structs.replace(run, header=structs.replace(run.header, config=config))
    model = load_cost_model("a100-llama3-8b")
    draws, _ = draw_costs(split, [model, model], follows_run=True)
    found = draws[0]
    assert [each.tensor for each in found if isinstance(each, RooflineCost)] == [1, 2]


def test_a_set_without_steps_is_no_error_if_it_had_nothing_to_do(run: RecordedRun) -> None:
    numbers = run.header.sets_of_replicas()
    steps = [step for step in run.steps if not numbers[step.replica]]
    silent = structs.replace(run, steps=steps)
    with pytest.raises(UsageError, match="replicaset small: no step was completed"):
        draw_costs(silent, [None, None], follows_run=True)
    requests = [each for each in run.workload.requests if not each.arrival.replicaset]
    silent = structs.replace(silent, workload=structs.replace(run.workload, requests=requests))
    draws, fits = draw_costs(silent, [None, None], follows_run=True)
    assert len(draws) == NUM_DRAWS
    assert fits[1] is None


def test_shapes_are_looked_for_among_those_of_the_replicaset(run: RecordedRun) -> None:
    assert len(shapes_of_sets(run)) == 2
    looks = LooksAtShapes(run.header, [RecordedShapes([]), RecordedShapes([SHAPE])])
    for replica in (0, 1, 2):
        looks.look(replica, SHAPE)
    assert looks.num_outside == 1
