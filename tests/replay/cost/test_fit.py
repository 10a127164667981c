"""Fitting: known costs are found again, sums come out right, and thin data is said to be thin."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from msgspec import structs

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.fit import MAX_RATIOS, fit_cost, measure_overheads
from eventlm.replay.cost.model import MILLION, LinearCost
from eventlm.replay.cost.recorded_steps import RecordedStep

TRUE_COST = LinearCost(
    base_ps=50_000_000_000,
    first_chunk_ps=12_000_000_000,
    prefill_ps=600_000_000,
    decode_ps=2_000_000_000,
    context_ps=12_000_000,
    chunk_context_ps=600_000,
)
#: How much longer a step takes than the shape says, by its number and when it starts.
Noise = Callable[[int, int], float]


def exact(_step: int, _start_ns: int) -> float:
    return 1.0


def a_shape(random: Random) -> StepShape:
    """Mostly decodes, some with a chunk, a few prefills alone, as a server has them."""
    num_decodes = random.randrange(1, 20) if random.random() < 0.95 else 0
    context_tokens = num_decodes * random.randrange(50, 600)
    if num_decodes and random.random() < 0.8:
        return StepShape(0, num_decodes, context_tokens, 0, 0)
    num_tokens, start = random.randrange(16, 600), random.choice([0, 0, 512])
    return StepShape(
        num_tokens, num_decodes, context_tokens + start + num_tokens, num_tokens * (start + num_tokens // 2), 1
    )


def run_of(
    num_steps: int, *, noise: Noise = exact, shapes: Callable[[Random], StepShape] = a_shape
) -> list[RecordedStep]:
    random = Random(5)
    steps, end_ns = [], 0
    for step in range(num_steps):
        shape, launched_ns, start_ns = shapes(random), max(end_ns - 1000, 0), end_ns + 300
        end_ns = start_ns + round(TRUE_COST.step_ns(shape, 0, step) * noise(step, start_ns))
        steps.append(
            RecordedStep(
                replica=0,
                epoch=1,
                step=step,
                shape=shape,
                launched_ns=launched_ns,
                start_ns=start_ns,
                end_ns=end_ns,
                completed_ns=end_ns + 700,
                s=step,
            )
        )
    return steps


def durations(steps: list[RecordedStep]) -> list[int]:
    return [step.end_ns - step.start_ns for step in steps]


def predictions(model: LinearCost, steps: list[RecordedStep]) -> list[int]:
    return [model.step_ns(step.shape, step.replica, step.step, step.start_ns) for step in steps]


def test_it_finds_exact_costs_again() -> None:
    steps = run_of(400)
    model, report, _ = fit_cost(steps)
    for predicted, recorded in zip(predictions(model, steps), durations(steps), strict=True):
        assert predicted == pytest.approx(recorded, rel=0.01)
    for field in ("base_ps", "prefill_ps", "decode_ps", "context_ps", "chunk_context_ps", "first_chunk_ps"):
        assert getattr(model, field) == pytest.approx(getattr(TRUE_COST, field), rel=0.1)
    assert report.num_steps == 399
    assert report.num_left_out == 1
    assert not report.notes
    assert report.p95 < 0.01


def test_sums_are_those_of_the_run_whatever_the_noise() -> None:
    """Outliers of ten times a step's duration belong to the sum too."""
    random = Random(11)
    steps = run_of(600, noise=lambda step, start_ns: 10.0 if random.random() < 0.01 else random.uniform(0.8, 1.3))[1:]
    others = [step._replace(step=step.step + 1, s=step.s + 1) for step in steps]
    model, report, _ = fit_cost([steps[0], *others], follows_run=False)
    recorded = sum(durations(steps))
    assert sum(predictions(model.without_noise(), steps)) == pytest.approx(recorded, rel=0.01)
    assert abs(report.sum_bias) < 0.05
    assert report.mean > 0.1


def test_ratios_have_the_spread_of_the_run_and_a_mean_of_one() -> None:
    random = Random(3)
    steps = run_of(2000, noise=lambda step, start_ns: random.uniform(0.5, 1.5))
    model, *_ = fit_cost(steps, follows_run=False)
    assert len(model.ratios_ppm) == MAX_RATIOS
    assert sum(model.ratios_ppm) / MAX_RATIOS == pytest.approx(MILLION, rel=1e-4)
    assert model.ratios_ppm[MAX_RATIOS // 10] == pytest.approx(0.6 * MILLION, rel=0.05)
    assert model.ratios_ppm[-MAX_RATIOS // 10] == pytest.approx(1.4 * MILLION, rel=0.05)
    assert not model.slowness_ppm


def test_draws_differ_by_what_the_run_leaves_open() -> None:
    random = Random(4)
    steps = run_of(800, noise=lambda step, start_ns: random.uniform(0.7, 1.3))
    model, _, draws = fit_cost(steps, num_draws=5)
    assert draws[0] == model
    assert not model.ratios_ppm
    assert len({(draw.base_ps, draw.decode_ps, draw.prefill_ps) for draw in draws}) == 5
    assert fit_cost(steps, num_draws=5).draws == draws
    recorded = sum(durations(steps))
    for draw in draws[1:]:
        assert len(draw.ratios_ppm) == MAX_RATIOS
        assert draw.decode_ps == pytest.approx(TRUE_COST.decode_ps, rel=0.5)
        assert sum(predictions(draw.without_noise(), steps)) == pytest.approx(recorded, rel=0.05)


def test_draws_of_an_exact_run_are_all_the_same_model() -> None:
    for draw in fit_cost(run_of(400), num_draws=3).draws:
        for field in ("base_ps", "prefill_ps", "decode_ps", "context_ps", "chunk_context_ps", "first_chunk_ps"):
            assert getattr(draw, field) == pytest.approx(getattr(TRUE_COST, field), rel=0.1)
        assert (draw.overheads.dispatch_ns, draw.overheads.between_ns, draw.overheads.report_ns) == (300, 300, 700)


def test_a_stall_of_a_short_step_is_not_drawn_for_long_ones_as_often() -> None:
    """Every tenth of the decodes takes ten times as long, which is a part of the run's time too small to draw."""
    steps = run_of(2000)
    short = sorted(durations(steps))[len(steps) // 4]
    index = 0
    noisy = []
    for step in steps:
        duration_ns = step.end_ns - step.start_ns
        index += duration_ns <= short
        factor = 10 if duration_ns <= short and index % 10 == 0 else 1
        noisy.append(step._replace(end_ns=step.start_ns + duration_ns * factor))
    model, *_ = fit_cost(noisy, follows_run=False)
    share_of_time = sum(d for d in durations(steps) if d <= short) / 10 / sum(durations(steps))
    num_stalls = sum(ratio > 3 * MILLION for ratio in model.ratios_ppm)
    assert num_stalls <= 2 * share_of_time * MAX_RATIOS + 1
    assert num_stalls < MAX_RATIOS / 10 / 4


def test_it_follows_a_machine_that_slows_down() -> None:
    """Twice as slow in the second half: the shape does not know, the time does."""
    half_ns = run_of(1000)[500].start_ns
    steps = run_of(1000, noise=lambda step, start_ns: 2.0 if start_ns > half_ns else 1.0)
    model, report, _ = fit_cost(steps)
    errors = [
        abs(predicted / recorded - 1)
        for predicted, recorded in zip(predictions(model, steps), durations(steps), strict=True)
    ]
    assert sorted(errors)[len(errors) // 2] < 0.08
    assert report.mean > 0.2
    assert report.mean_near < 0.1
    assert model.slowness_ppm[-2] > 1.8 * model.slowness_ppm[1]
    # Behind the run nothing is known of the time.
    shape = steps[0].shape
    assert model.step_ns(shape, 0, 0, 10**15) == model.without_noise().step_ns(shape, 0, 0)


def test_the_first_step_of_a_worker_is_left_out() -> None:
    steps = run_of(300, noise=lambda step, start_ns: 50.0 if step == 0 else 1.0)
    model, report, _ = fit_cost(steps)
    assert report.num_left_out == 1
    assert model.base_ps == pytest.approx(TRUE_COST.base_ps, rel=0.05)


def test_few_steps_scale_the_defaults_and_say_so() -> None:
    steps = run_of(6)
    model, report, _ = fit_cost(steps)
    assert "only 5 steps" in report.notes[0]
    assert sum(predictions(model, steps[1:])) == pytest.approx(sum(durations(steps[1:])), rel=0.02)
    assert all(getattr(model, field) > 0 for field in ("base_ps", "prefill_ps", "decode_ps"))


def test_a_single_step_is_enough_to_go_on_with() -> None:
    [step] = run_of(1)
    model, report, _ = fit_cost([step])
    assert (report.num_steps, report.num_left_out) == (1, 0)
    assert model.step_ns(step.shape, 0, 0) == pytest.approx(step.end_ns - step.start_ns, rel=0.01)


def test_steps_of_one_shape_say_little_of_others() -> None:
    shape = StepShape(0, 4, 400, 0, 0)
    steps = run_of(200, shapes=lambda random: shape)
    model, report, _ = fit_cost(steps)
    assert "same shape" in report.notes[0]
    assert model.step_ns(shape, 0, 0, 10**15) == pytest.approx(TRUE_COST.step_ns(shape, 0, 0), rel=0.01)
    # A longer prompt is never free.
    assert model.prefill_ps > 0


def test_no_steps_cannot_be_fitted() -> None:
    with pytest.raises(UsageError, match="no step was completed"):
        fit_cost([])


def test_overheads_are_means_of_what_they_are_named_for() -> None:
    def step(
        number: int, launched_ns: int, start_ns: int, end_ns: int, completed_ns: int, *, replica: int = 0
    ) -> RecordedStep:
        shape = StepShape(0, 1, 10, 0, 0)
        return RecordedStep(replica, 1, number, shape, launched_ns, start_ns, end_ns, completed_ns, number)

    steps = [
        step(0, 0, 50, 1000, 1010),
        step(1, 100, 1004, 2000, 2010),
        step(2, 1010, 2008, 3000, 3040),
        step(0, 2500, 2590, 2600, 2610, replica=1),
        step(3, 5000, 5060, 6000, 6010),
    ]
    overheads = measure_overheads(steps)
    # The first step of each worker counts for neither: what it waited for is not known.
    assert (overheads.between_ns, overheads.dispatch_ns, overheads.report_ns) == (6, 60, 16)


def test_the_handover_of_a_run_that_never_ran_ahead_is_unknown() -> None:
    late = [step._replace(launched_ns=step.start_ns - 100) for step in run_of(60)]
    model, report, _ = fit_cost(late)
    assert (model.overheads.between_ns, model.overheads.dispatch_ns) == (0, 100)
    assert report.notes == ["no step was launched while another ran: the time between two in a row is assumed to be 0"]
    # One step that was is enough.
    late[7] = run_of(60)[7]
    model, report, _ = fit_cost(late)
    assert (model.overheads.between_ns, report.notes) == (300, [])


def test_late_completions_are_stalls_of_the_engine_where_the_run_is_followed() -> None:
    shape = StepShape(0, 1, 10, 0, 0)
    reports = [10, 12, 400, 11, 13, 10, 900, 12]
    steps = [
        RecordedStep(
            0, 1, index, shape, 1000 * index, 1000 * index, 1000 * index + 500, 1000 * index + 500 + report, index
        )
        for index, report in enumerate(reports)
    ]
    overheads = measure_overheads(steps, follows_run=True)
    assert overheads.stalls == [(2500, 2900), (6500, 7400)]
    assert overheads.report_ns == 11
    # One that is due in a stall waits for its end, wherever in it that is.
    assert [overheads.completed_ns(end_ns) for end_ns in (2400, 2495, 2880, 2889, 2900)] == [
        2411,
        2900,
        2900,
        2900,
        2911,
    ]
    assert overheads.completed_ns(100) == 111
    # Two that overlap are one.
    twice = [steps[2], steps[2]._replace(end_ns=2700, completed_ns=3100), *steps[3:6], *steps[:2]]
    assert measure_overheads(twice, follows_run=True).stalls == [(2500, 3100)]
    # Elsewhere nobody knows when they come.
    means = measure_overheads(steps)
    assert (means.stalls, means.report_ns) == ([], 171)


def test_a_fit_is_the_same_every_time() -> None:
    random = Random(2)
    steps = run_of(300, noise=lambda step, start_ns: random.uniform(0.9, 1.2))
    assert fit_cost(steps) == fit_cost(steps)


def test_a_run_that_idles_for_days_has_a_bounded_number_of_windows() -> None:
    steps = run_of(300)
    late = [step._replace(start_ns=step.start_ns + 10**15, end_ns=step.end_ns + 10**15) for step in run_of(300)]
    model, *_ = fit_cost([*steps, *late])
    assert len(model.slowness_ppm) <= 4097
    assert len(set(model.slowness_ppm)) <= 4


@pytest.mark.parametrize(("num_decoding", "seed"), [(1, 22), (3, 39), (5, 37), (10, 22)])
def test_a_resample_without_steps_of_some_shape_gives_them_their_time(num_decoding: int, seed: int) -> None:
    """A noisy run whose last steps alone only decode. Fits to some resamples gave those no time at all."""

    def shape(random: Random) -> StepShape:
        if next(numbers) < 50 - num_decoding:
            num_tokens = random.randrange(100, 2000)
            return StepShape(num_tokens, 0, num_tokens, num_tokens * num_tokens // 2, 1)
        return StepShape(0, random.randrange(1, 3), random.randrange(50, 6000), 0, 0)

    numbers, noise = iter(range(50)), Random(seed)
    steps = run_of(50, noise=lambda _step, _start_ns: noise.lognormvariate(0, 2.0), shapes=shape)
    fitted = fit_cost(steps, num_draws=5)
    mean_ns = sum(durations(steps)) / len(steps)
    for draw in fitted.draws:
        assert min(structs.replace(draw, ratios_ppm=[]).step_ns(step.shape, 0, 0) for step in steps) > mean_ns / 10**4


def test_of_a_pipeline_it_finds_the_slowest_stage_and_the_way_between_them() -> None:
    random, steps, free_ns = Random(5), list[RecordedStep](), [0, 0]
    for step in range(400):
        shape, launched_ns = a_shape(random), max(free_ns[0] - 1000, 0)
        slowest_ns = TRUE_COST.step_ns(shape, 0, step)
        first = (free_ns[0] + 300, free_ns[0] + 300 + slowest_ns)
        # The second stage has half as much to do, and is idle when a step comes.
        second = (first[1] + 200, first[1] + 200 + slowest_ns // 2)
        free_ns = [first[1], second[1]]
        steps.append(
            RecordedStep(0, 1, step, shape, launched_ns, first[0], second[1], second[1] + 700, step, [first, second])
        )
    model, *_ = fit_cost(steps, follows_run=False)
    assert model.stages_ppm == pytest.approx([MILLION, MILLION // 2], rel=1e-3)
    assert (model.overheads.between_ns, model.overheads.hand_over_ns) == (300, 200)
    whole = structs.replace(model, ratios_ppm=[])
    shape = StepShape(0, 10, 3000, 0, 0)
    assert whole.step_ns(shape, 0, 0) == pytest.approx(TRUE_COST.step_ns(shape, 0, 0), rel=0.01)
