"""Durations from shapes: linear, with what is drawn for a step and known of a time."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.group_work import GroupWork
from eventlm.replay.cost.model import MILLION, LinearCost, Overheads, draw

SHAPE = StepShape(prefill_tokens=100, num_decodes=3, context_tokens=700, chunk_context=5_000, num_chunks=2)


def test_each_feature_costs_its_coefficient() -> None:
    model = LinearCost(
        base_ps=1_000_000,
        prefill_ps=10_000,
        decode_ps=200_000,
        context_ps=1_000,
        chunk_context_ps=100,
        first_chunk_ps=50_000,
    )
    assert model.step_ns(SHAPE, 0, 0) == 1000 + 1000 + 600 + 700 + 500 + 50
    assert model.step_ns(structs.replace(SHAPE, num_chunks=0), 0, 0) == 1000 + 1000 + 600 + 700 + 500


def test_a_step_takes_at_least_a_nanosecond() -> None:
    assert LinearCost(base_ps=0).step_ns(SHAPE, 0, 0) == 1


def test_the_same_arguments_give_the_same_duration_everywhere() -> None:
    """The numbers are part of what a simulation with a seed is."""
    model = LinearCost(base_ps=10**9, ratios_ppm=[500_000, 1_000_000, 1_500_000], seed=7)
    drawn = [model.step_ns(SHAPE, replica, step) for replica in (0, 1) for step in range(6)]
    low, middle, high = 500_000, 1_000_000, 1_500_000
    assert drawn == [low, middle, high, high, high, high, middle, high, high, high, low, low]


def test_ratios_are_drawn_evenly() -> None:
    ratios = [400_000, 800_000, 1_200_000, 1_600_000]
    model = LinearCost(base_ps=10**12, ratios_ppm=ratios)
    drawn = [model.step_ns(SHAPE, step % 2, step) for step in range(4000)]
    counts = [drawn.count(ratio * 1000) for ratio in ratios]
    assert sum(counts) == 4000
    assert all(900 < count < 1100 for count in counts)


def test_seeds_and_replicas_draw_differently() -> None:
    draws = {draw(seed, replica, step) for seed in range(10) for replica in range(10) for step in range(100)}
    assert len(draws) == 10_000


def test_slowness_holds_in_its_window_only() -> None:
    model = LinearCost(
        base_ps=10**9, slowness_ppm=[2 * MILLION, MILLION // 2], slowness_start_ns=100, slowness_window_ns=50
    )
    at = {start_ns: model.step_ns(SHAPE, 0, 0, start_ns) for start_ns in (0, 99, 100, 149, 150, 199, 200, 10**9)}
    assert [at_ns // 1000 for at_ns in at.values()] == [1000, 1000, 2000, 2000, 500, 500, 1000, 1000]
    assert model.without_noise() == LinearCost(base_ps=10**9, slowness_start_ns=100, slowness_window_ns=50)


@pytest.mark.parametrize("field", ["base_ps", "first_chunk_ps"])
def test_large_numbers_stay_exact(field: str) -> None:
    model = LinearCost(**{"base_ps": 0, field: 3 * 10**18})
    assert model.step_ns(SHAPE, 0, 0) == 3 * 10**15


def test_stages_share_the_work() -> None:
    model = LinearCost(base_ps=8_000_000, prefill_ps=40_000, overheads=Overheads(hand_over_ns=70))
    assert model.stages_ns(GroupWork(SHAPE), 0, 0) == [model.step_ns(SHAPE, 0, 0)]
    assert model.in_parts(1, 1) is model
    split = model.in_parts(4, 1)
    assert split.stages_ns(GroupWork(SHAPE), 0, 0) == [model.step_ns(SHAPE, 0, 0) // 4] * 4
    assert split.hand_over_ns(SHAPE) == 70
    # A run of two uneven stages, in one and in three.
    uneven = structs.replace(model, stages_ppm=[MILLION, MILLION // 2])
    slowest_ns = model.step_ns(SHAPE, 0, 0)
    assert uneven.stages_ns(GroupWork(SHAPE), 0, 0) == [slowest_ns, slowest_ns // 2]
    assert uneven.in_parts(1, 1).stages_ns(GroupWork(SHAPE), 0, 0) == [slowest_ns * 3 // 2]
    assert uneven.in_parts(3, 1).stages_ns(GroupWork(SHAPE), 0, 0) == [slowest_ns // 2] * 3


def test_what_groups_exchange_is_in_the_coefficients_of_their_run() -> None:
    model = LinearCost(base_ps=1_000_000, groups=2)
    assert model.in_parts(3, 2).groups == 2
    with pytest.raises(UsageError, match="1 KV group: a linear cost model of 2 does not say"):
        model.in_parts(1, 1)
