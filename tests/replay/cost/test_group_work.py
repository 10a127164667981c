"""What each KV group computes of a step, from launches alone."""

from __future__ import annotations

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.predictor import StepShape
from eventlm.events import Event, Launched
from eventlm.replay.cost.group_work import GroupWork, WorkOfSteps, most_of, shape_of
from eventlm.replay.simulate.simulation import simulate
from tests.replay.made_workloads import COST, PREDICTOR, make_engine, make_workload


def test_the_shape_of_a_launch() -> None:
    launched = Launched(
        replica=0,
        epoch=1,
        step=0,
        decodes=[(1, 0, 40, 1), (2, 0, 9, 0)],
        chunks=[(3, 0, 64, 10, 1)],
        num_tokens=12,
        predicted_ns=0,
    )
    assert shape_of(launched) == StepShape(
        prefill_tokens=10, num_decodes=2, context_tokens=41 + 9 + 74, chunk_context=10 * 69, num_chunks=1
    )


def test_every_group_has_the_tokens_that_the_launch_counts() -> None:
    """Preemptions, shared prefixes and samples among them."""
    setup = make_engine(num_blocks=24, kv_parallel_size=3, kv_shard_tokens=32)
    works = WorkOfSteps([setup.core])
    num_shared = 0

    def see(event: Event) -> None:
        nonlocal num_shared
        if isinstance(event, Launched):
            found = works.of(event)
            assert [each.shape.prefill_tokens + each.shape.num_decodes for each in found] == event.loads
            # A row of several groups has its context in them together.
            assert sum(each.shape.context_tokens for each in found) == shape_of(event).context_tokens
            num_shared += any(each.parts for each in found)

    cost = structs.replace(COST, groups=3)
    simulate(make_workload(4), setup, cost, predictor=PREDICTOR, subscribers=[see], validate_every=1)
    assert num_shared > 50


def test_rows_that_several_groups_compute_count_in_each() -> None:
    config = CoreConfig(models=["m"], num_blocks=8, max_model_len=100, num_kv_groups=2, kv_shard_tokens=32)
    works = WorkOfSteps([config])
    # It begins in the second group, and its second shard is in the first.
    first = Launched(
        replica=0, epoch=1, step=0, chunks=[(3, 0, 0, 32, 0)], blocks=[(0, 0, [9, 10, 2, 3])], num_tokens=32,
        predicted_ns=0,
    )  # fmt: skip
    alone = StepShape()
    alone.add_chunk(0, 32)
    assert works.of(first) == [GroupWork(StepShape()), GroupWork(alone)]
    assert most_of(works.of(first)) == alone
    second = structs.replace(first, step=1, chunks=[(3, 0, 32, 20, 1)], blocks=[])
    own, other = works.of(second)
    assert own == GroupWork(StepShape(20, 0, 20, 20 * 10, 1), 20)
    assert other == GroupWork(StepShape(20, 0, 32, 20 * 32, 1), 20)


def test_without_groups_it_is_what_the_worker_does() -> None:
    launched = Launched(replica=0, epoch=1, step=0, decodes=[(1, 0, 40, 1)], num_tokens=1, predicted_ns=0)
    works = WorkOfSteps([CoreConfig(models=["m"], num_blocks=8, max_model_len=100)])
    assert works.of(launched) == [GroupWork(shape_of(launched))]
