"""Fits a cost model to the steps of a recorded run.

Durations are a linear function of the shape with non-negative coefficients. Squared errors are weighted by one over the
prediction (quasi-Poisson regression with the identity link). So the predicted durations of a run add up to the recorded
ones; queueing depends on sums, not on medians. Directions that the steps do not determine keep the ratio of the
predictor's default coefficients, scaled to the run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from eventlm.core.predictor import DEFAULT_COEFFICIENTS
from eventlm.errors import UsageError
from eventlm.replay.cost.model import MILLION, LinearCost, Overheads
from eventlm.replay.cost.recorded_steps import RecordedStep

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

#: The coefficients of `LinearCost` in the order of the features' columns.
COEFFICIENTS = ("base_ps", "prefill_ps", "decode_ps", "context_ps", "chunk_context_ps", "first_chunk_ps")
#: With fewer steps the coefficients are guesses.
MIN_STEPS = 20
NUM_FOLDS = 5
#: Steps that stay together in a resample of the run, because neighbours share the speed of the machine.
BLOCK_STEPS = 20
#: A completion is late, held up by something else, if it took this many times the median.
LATE_REPORTS = 3
MAX_STALLS = 4096
#: Values that represent the distribution of the ratios.
MAX_RATIOS = 256
#: Lengths, in mean steps, of the periods in which the machine has a constant speed, longest first. The one that
#: predicts held-out steps best is used.
WINDOW_STEPS = (160, 80, 40, 20, 10, 5)
#: Mean steps of mean speed that are added to each period as a prior.
WINDOW_PRIOR_STEPS = 0.5
MAX_WINDOWS = 4096
#: Weight of a default coefficient, in recorded steps whose time it would decide alone; larger if there are few steps.
#: Mean error of a step's duration above which a comparison means nothing.
MAX_ERROR = 0.5
#: Of the time that the fit to the whole run gives a step: what the fit to a resample must give it.
LEAST_SHARE = 0.1
#: Of the mean duration: what any step takes at least.
LEAST_PREDICTED = 1e-3
_PRIOR_WEIGHT = 0.01
_PRIOR_WEIGHT_OF_FEW = 0.3
_NUM_ROUNDS = 8


class FitReport(Struct, frozen=True, kw_only=True):
    """Cross-validation errors, as fractions of a step's duration.

    Each fifth of the run in time is predicted by a fit to the others, by shape alone, because neighbouring steps share
    the speed of the machine. mean, median, p95: absolute relative errors. sum_bias: of the sum of all durations,
    positive if too long. fold_bias: mean absolute error of the sum of a fifth. mean_near: mean error if every fifth
    step is held out and the slowness of its period is taken from the others. If it is far below `mean`, the speed of
    the machine varied.
    num_left_out: first steps of workers. notes: reasons for caution.
    """

    num_steps: int
    num_left_out: int = 0
    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    sum_bias: float = 0.0
    fold_bias: float = 0.0
    mean_near: float = 0.0
    notes: list[str] = []


class FittedCost(NamedTuple):
    """A cost model and its quality. draws: the model itself, then models fitted to resamples of the run."""

    model: LinearCost
    report: FitReport
    draws: list[LinearCost]


class _Windows(NamedTuple):
    """Equal periods of the time axis, and the period in which each step begins: [steps]."""

    start_ns: int
    width_ns: int
    of_step: Integers

    @classmethod
    def over(cls, steps: Sequence[RecordedStep], num_mean_steps: int) -> _Windows:
        import numpy as np

        starts_ns = np.array([step.start_ns for step in steps])
        first_ns, last_ns = int(starts_ns.min()), int(starts_ns.max())
        mean_ns = sum(step.duration_ns for step in steps) // len(steps)
        width_ns = max(num_mean_steps * mean_ns, (last_ns - first_ns) // MAX_WINDOWS, 0) + 1
        return cls(first_ns, width_ns, (starts_ns - first_ns) // width_ns)


def fit_cost(
    steps: Sequence[RecordedStep], *, follows_run: bool = True, num_draws: int = 1, num_groups: int = 1
) -> FittedCost:
    """Fit coefficients, overheads and residuals.

    follows_run: the model will be used on the run's own time axis. Each step is then as slow or fast as the run's steps
    around that time, and delays of the engine occur again (`Overheads.stalls`). On a shared machine this explains most
    of what the shape does not. It answers what another policy would have met on that machine in those minutes. It is
    wrong if the load comes at other times (arrivals sped up, a closed loop, another workload) or if the policy itself
    slows the machine down. Because a period is exactly as slow as its few steps were, a repetition under the same
    policy comes closer to the run than a prediction can. Steps then draw no ratios; recorded runs are reproduced more
    closely without.

    Otherwise each step draws independently from the recorded ratios of duration to prediction, so there are no slow
    minutes.

    num_draws: how many models to return. All but the first are fitted to a resample of the run (a block bootstrap) and
    draw the ratios that their own prediction leaves; late reports are in their means, not stalls. Simulations with them
    differ by what the run does not determine: how durations depend on the shape, and chance in the schedule.

    num_groups: KV groups of the run.

    The first step of each worker is left out if there are others, because it allocates memory. Raises UsageError if
    there is no step.
    """
    if not steps:
        raise UsageError("no step was completed: there is nothing to fit a cost model to")
    import numpy as np  # not at the top: it is slow to import

    used = _without_first(steps)
    features = _features(used)
    durations = np.array([max(step.duration_ns, 1) for step in used], dtype=float) * 1000
    windows, mean_near = _best_windows(used, features, durations)
    of_run_coefficients = _solve(features, durations)
    of_run = features @ of_run_coefficients

    def model_of(draw: int) -> LinearCost:
        """The model of the run, or of a resample that keeps the slowness of each period."""
        rows = _resample(len(used), draw)
        sample = [used[row] for row in rows] if draw else steps
        overheads = measure_overheads(sample, follows_run=follows_run and not draw)
        coefficients = _solve(features[rows], durations[rows])
        predicted = features @ coefficients
        if (predicted < of_run * LEAST_SHARE).any():
            # The resample has no steps of some shape, and its fit gives them no time.
            coefficients, predicted = of_run_coefficients, of_run
        named = {name: max(round(float(value)), 0) for name, value in zip(COEFFICIENTS, coefficients, strict=True)}
        model = structs.replace(
            LinearCost(base_ps=0),
            seed=draw,
            overheads=overheads,
            stages_ppm=_stages_ppm(used),
            groups=num_groups,
            **named,
        )
        if follows_run and windows is not None:
            slowness = _slowness(windows.of_step, durations, predicted)
            predicted = predicted * slowness[windows.of_step]
            model = structs.replace(
                model,
                slowness_ppm=[round(float(value) * MILLION) for value in slowness],
                slowness_start_ns=windows.start_ns,
                slowness_window_ns=windows.width_ns,
            )
        has_ratios = draw > 0 or not follows_run
        return structs.replace(model, ratios_ppm=_ratios(durations, predicted)) if has_ratios else model

    draws = [model_of(draw) for draw in range(num_draws)]
    report = _report(features, durations, num_left_out=len(steps) - len(used))
    notes = list(report.notes)
    if not _gaps(steps)[1]:
        # All steps are long. An alternative may still launch one while another runs.
        notes.append("no step was launched while another ran: the time between two in a row is assumed to be 0")
    return FittedCost(draws[0], structs.replace(report, mean_near=mean_near, notes=notes), draws)


def _resample(count: int, draw: int) -> Integers:
    """Indices of steps: all of them for draw 0, else periods of the run drawn with replacement."""
    import numpy as np

    indices = np.arange(count)
    if not draw:
        return indices
    blocks = np.array_split(indices, max(count // BLOCK_STEPS, min(count, NUM_FOLDS)))
    return np.concatenate(random.Random(f"{draw}").choices(blocks, k=len(blocks)))


def measure_overheads(steps: Sequence[RecordedStep], *, follows_run: bool = False) -> Overheads:
    """Means, so that their sums are right. Dispatch: of launches to an idle worker; between: of launches while the step
    before was running, 0 if there are none; report: of all, or with `follows_run` of those that were not late. Late
    ones become stalls.
    """
    dispatch, between = _gaps(steps)
    report = [step.completed_ns - step.end_ns for step in steps]
    stalls = []
    if follows_run:
        late_ns = LATE_REPORTS * sorted(report)[len(report) // 2]
        stalls = _stalls(steps, late_ns)
        report = [ns for ns in report if ns <= late_ns]
    return Overheads(
        dispatch_ns=_mean(dispatch or between),
        between_ns=_mean(between),
        report_ns=_mean(report),
        hand_over_ns=_mean(_hand_overs(steps)),
        stalls=stalls,
    )


def _gaps(steps: Sequence[RecordedStep]) -> tuple[list[int], list[int]]:
    """For each step whose predecessor in the same worker comes before it: the time from its launch if the worker was
    idle, else from the end of the predecessor.
    """
    last: dict[tuple[int, int], RecordedStep] = {}
    dispatch: list[int] = []
    between: list[int] = []
    for step in steps:
        before = last.get((step.replica, step.epoch))
        last[step.replica, step.epoch] = step
        if before is None or step.step != before.step + 1:
            continue
        if step.launched_ns >= before.freed_ns:
            dispatch.append(step.start_ns - step.launched_ns)
        else:
            between.append(step.start_ns - before.freed_ns)
    return dispatch, between


def _hand_overs(steps: Sequence[RecordedStep]) -> list[int]:
    """For each stage that was idle when the one before it ended: how long it took to start."""
    found: list[int] = []
    freed: dict[tuple[int, int], Sequence[tuple[int, int]]] = {}
    for step in steps:
        before = freed.get((step.replica, step.epoch), ())
        freed[step.replica, step.epoch] = step.stages
        for stage, ((_, end_ns), (start_ns, _)) in enumerate(pairwise(step.stages), start=1):
            if len(before) <= stage or before[stage][1] <= end_ns:
                found.append(start_ns - end_ns)
    return found


def _stages_ppm(steps: Sequence[RecordedStep]) -> list[int]:
    """What each stage takes of the slowest one's time; empty without a pipeline."""
    if not all(step.stages for step in steps):
        return []
    totals = [
        sum(max(end_ns - start_ns, 1) for start_ns, end_ns in stage)
        for stage in zip(*(s.stages for s in steps), strict=True)
    ]
    slowest = sum(max(step.duration_ns, 1) for step in steps)
    return [max(total * MILLION // slowest, 1) for total in totals]


def _stalls(steps: Sequence[RecordedStep], late_ns: int) -> list[tuple[int, int]]:
    """From the end of each step whose completion was applied late, until it was."""
    late = [step for step in steps if step.completed_ns - step.end_ns > late_ns]
    late.sort(key=lambda step: step.end_ns - step.completed_ns)
    found: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted((step.end_ns, step.completed_ns) for step in late[:MAX_STALLS]):
        if found and begin_ns <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_ns)
        else:
            found.append((begin_ns, end_ns))
    return found


def _mean(values: Sequence[int]) -> int:
    return max(sum(values) // len(values), 0) if values else 0


def _without_first(steps: Sequence[RecordedStep]) -> Sequence[RecordedStep]:
    seen: set[tuple[int, int]] = set()
    used = []
    for step in steps:
        if (step.replica, step.epoch) in seen:
            used.append(step)
        seen.add((step.replica, step.epoch))
    return used or steps


def _features(steps: Sequence[RecordedStep]) -> Floats:
    """[steps, 6], in the order of COEFFICIENTS."""
    import numpy as np

    rows = [
        (1, s.prefill_tokens, s.num_decodes, s.context_tokens, s.chunk_context, s.num_chunks > 0)
        for s in (step.shape for step in steps)
    ]
    return np.array(rows, dtype=float)


def _defaults() -> Floats:
    """The predictor's, with a first chunk at a quarter of a step."""
    import numpy as np

    return np.array([*DEFAULT_COEFFICIENTS, DEFAULT_COEFFICIENTS[0] / 4])


def _solve(features: Floats, durations: Floats) -> Floats:
    """Non-negative coefficients by iteratively reweighted least squares.

    In units of the defaults, so that the columns are of comparable size.
    """
    import numpy as np

    defaults = _defaults()
    defaults = defaults * (durations.sum() / (features @ defaults).sum())
    scaled = features * defaults
    predicted = scaled.sum(axis=1)
    found = np.ones(len(defaults))
    for _ in range(_NUM_ROUNDS):
        weights = 1 / np.sqrt(predicted * predicted.mean())
        found = _non_negative(scaled * weights[:, None], durations * weights)
        predicted = np.maximum(scaled @ found, LEAST_PREDICTED * durations.mean())
    # The prior has changed the sum slightly.
    scale = float(durations.sum() / (scaled @ found).sum())
    coefficients = np.asarray(defaults * found * scale)
    # Few and noisy steps may leave a shape without any time.
    coefficients[0] = max(coefficients[0], LEAST_PREDICTED * durations.mean())
    return coefficients


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Least squares of `rows @ x = wanted` with a weak prior of x = 1. The most negative x is set to 0 first."""
    import numpy as np

    count = rows.shape[1]
    prior = (_PRIOR_WEIGHT if len(rows) >= MIN_STEPS else _PRIOR_WEIGHT_OF_FEW) ** 2
    products, sides = rows.T @ rows + prior * np.eye(count), rows.T @ wanted + prior
    kept = list(range(count))
    while True:
        values = np.linalg.solve(products[np.ix_(kept, kept)], sides[kept])
        if (values >= 0).all():
            break
        del kept[int(values.argmin())]
    found = np.zeros(count)
    found[kept] = values
    return found


def _slowness(windows: Integers, durations: Floats, predicted: Floats) -> Floats:
    """[windows], the ratio of measured to predicted time in each."""
    import numpy as np

    prior = WINDOW_PRIOR_STEPS * durations.mean()
    return np.asarray((np.bincount(windows, durations) + prior) / (np.bincount(windows, predicted) + prior))


def _ratios(durations: Floats, predicted: Floats) -> list[int]:
    """Quantiles of the ratios in ppm, each step weighted by its predicted time; their mean is a million.

    A stall of some milliseconds makes a ratio of ten in a step that takes two. Unweighted, such ratios would be drawn
    for long steps too and cost many times the stall.
    """
    import numpy as np

    ratios = durations / predicted
    order = np.argsort(ratios)
    shares = np.cumsum(predicted[order]) - predicted[order] / 2
    count = min(len(ratios), MAX_RATIOS)
    middles = (np.arange(count) + 0.5) / count * predicted.sum()
    values = np.interp(middles, shares, ratios[order])
    values /= values.mean()
    return [max(round(float(value) * MILLION), 1) for value in values]


def _best_windows(steps: Sequence[RecordedStep], features: Floats, durations: Floats) -> tuple[_Windows | None, float]:
    """The windows whose slowness, taken from four steps of five, predicts the fifth best, and the mean error.

    None if constant speed predicts better.
    """
    import numpy as np

    if len(steps) < MIN_STEPS:
        return None, 0.0
    folds = np.arange(len(steps)) % NUM_FOLDS
    predicted = [features @ _solve(features[folds != fold], durations[folds != fold]) for fold in range(NUM_FOLDS)]

    def mean_error(index: Integers) -> float:
        errors = []
        for fold, of_all in enumerate(predicted):
            held = folds == fold
            known = np.where(held, 0.0, 1.0)
            slowness = _slowness(index, durations * known, of_all * known)
            errors.append(np.abs(of_all[held] * slowness[index[held]] / durations[held] - 1))
        return float(np.concatenate(errors).mean())

    best, least = None, mean_error(np.zeros(len(steps), dtype=np.int64))
    for num_mean_steps in WINDOW_STEPS:
        windows = _Windows.over(steps, num_mean_steps)
        error = mean_error(windows.of_step)
        if error < least:
            best, least = windows, error
    return best, least


def _report(features: Floats, durations: Floats, *, num_left_out: int) -> FitReport:
    import numpy as np

    count = len(durations)
    notes = []
    if count < MIN_STEPS:
        notes.append(f"only {count} steps: how durations depend on the shape is a guess, their sum is not")
    elif (features == features[0]).all():
        notes.append("all steps have the same shape: how durations depend on it is a guess")
    if count < NUM_FOLDS:
        return FitReport(num_steps=count, num_left_out=num_left_out, notes=notes)
    folds = np.arange(count) * NUM_FOLDS // count
    predicted = np.empty(count)
    for fold in range(NUM_FOLDS):
        others = folds != fold
        predicted[~others] = features[~others] @ _solve(features[others], durations[others])
    errors = np.abs(predicted / durations - 1)
    if errors.mean() > MAX_ERROR:
        notes.append("that is too much to compare engines by: record more requests")
    sums = np.bincount(folds, predicted) / np.bincount(folds, durations)
    return FitReport(
        num_steps=count,
        num_left_out=num_left_out,
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        p95=float(np.percentile(errors, 95)),
        sum_bias=float(predicted.sum() / durations.sum() - 1),
        fold_bias=float(np.abs(sums - 1).mean()),
        notes=notes,
    )
