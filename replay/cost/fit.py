"""Fits a cost model to the steps of a recorded run.

The durations are a linear function of the shape with coefficients that are not negative. Their squared errors are
weighted by one over the prediction, as of a quantity whose variance grows with its mean (quasi-Poisson regression with
the identity link): then the predicted durations of the run add up to the recorded ones, and queues feel sums, not
medians. Directions that the steps do not tell apart stay where the predictor's defaults, made as fast as the run, have
them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
COEFFICIENTS = ("base_ps", "first_chunk_ps", "prefill_ps", "decode_ps", "context_ps", "chunk_context_ps")
#: With fewer steps the coefficients are guesses.
MIN_STEPS = 20
NUM_FOLDS = 5
#: A completion that took so many times as long as half of them was held up by something else.
LATE_REPORTS = 3
MAX_STALLS = 4096
#: Values that stand for the distribution of the ratios.
MAX_RATIOS = 256
#: Lengths, in mean steps, of the stretches of the run in which the machine has one speed, longest first; the one that
#: predicts held-out steps best is taken.
WINDOW_STEPS = (160, 80, 40, 20, 10, 5)
#: So many mean steps of mean speed are added to what the machine did in a stretch.
WINDOW_PRIOR_STEPS = 0.5
MAX_WINDOWS = 4096
#: How much a default counts, in recorded steps whose time it would decide alone; more where there are few of them.
_PRIOR_WEIGHT = 0.01
_PRIOR_WEIGHT_OF_FEW = 0.3
_NUM_ROUNDS = 8


class FitReport(Struct, frozen=True, kw_only=True):
    """How well a fit predicts steps that it has not seen, in fractions of a step's duration.

    Each fifth of the run in time is predicted by a fit on the others, without what is known of the time: neighbours
    share the machine's mood. mean, median, p95: absolute relative errors. sum_bias: of the sum of all durations,
    positive where too long is predicted. fold_bias: how far, in the mean, the sum of a fifth is off. mean_near: mean
    where every fifth step is held out and the slowness of its stretch is known from the others in it. Where it is far
    below `mean`, it is the machine that was uneven, not the shapes.
    num_left_out: first steps of workers. notes: what to know before trusting it.
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
    """A cost model and how good it is."""

    model: LinearCost
    report: FitReport


class _Windows(NamedTuple):
    """Stretches of the time axis, and in which of them each step begins: [steps]."""

    start_ns: int
    width_ns: int
    places: Integers

    @classmethod
    def over(cls, steps: Sequence[RecordedStep], num_mean_steps: int) -> _Windows:
        import numpy as np

        starts_ns = np.array([step.start_ns for step in steps])
        first_ns, last_ns = int(starts_ns.min()), int(starts_ns.max())
        mean_ns = sum(step.end_ns - step.start_ns for step in steps) // len(steps)
        width_ns = max(num_mean_steps * mean_ns, (last_ns - first_ns) // MAX_WINDOWS, 0) + 1
        return cls(first_ns, width_ns, (starts_ns - first_ns) // width_ns)


def fit_cost(steps: Sequence[RecordedStep], *, follows_run: bool = True, seed: int = 0) -> FittedCost:
    """Fit coefficients, overheads and what the shape does not explain.

    follows_run: the steps will be asked for on the run's own time axis, so each takes longer or shorter as the run's
    own around that time did, and what held the engine up then does so again (`Overheads.stalls`). On a machine that
    others use too this is most of what a shape leaves unexplained. It says what another policy would have met on that
    machine in those minutes. It does not hold where the load comes at other times (arrivals sped up, a closed loop,
    another workload), nor where it is the policy that slows the machine down; and since a stretch is as slow as its
    few steps were, a repetition under the same policy is nearer to the run than a prediction can be. Steps draw no
    ratios beside it: recorded runs come out nearer without.

    Without it, each step draws from the recorded ratios of duration to prediction: independently, so slow minutes do
    not exist.

    The first step of each worker is left out if there are others: it pays for memory. Raises UsageError if there is
    no step.
    """
    if not steps:
        raise UsageError("no step was completed: there is nothing to fit a cost model on")
    import numpy as np  # not at the top: commands that fit nothing need not wait for it

    used = _without_first(steps)
    features = _features(used)
    durations = np.array([max(step.end_ns - step.start_ns, 1) for step in used], dtype=float) * 1000
    coefficients = _solve(features, durations)
    predicted = features @ coefficients
    windows, mean_near = _best_windows(used, features, durations)
    named = dict(zip(COEFFICIENTS, _integers(coefficients), strict=True))
    model = structs.replace(
        LinearCost(base_ps=0), seed=seed, overheads=measure_overheads(steps, follows_run=follows_run), **named
    )
    if not follows_run:
        model = structs.replace(model, ratios_ppm=_ratios(durations, predicted))
    elif windows is not None:
        slowness = _slowness(windows.places, durations, predicted)
        model = structs.replace(
            model,
            slowness_ppm=[round(float(value) * MILLION) for value in slowness],
            slowness_start_ns=windows.start_ns,
            slowness_window_ns=windows.width_ns,
        )
    report = _report(features, durations, num_left_out=len(steps) - len(used))
    notes = [*report.notes, *_overhead_notes(steps)]
    return FittedCost(model, structs.replace(report, mean_near=mean_near, notes=notes))


def measure_overheads(steps: Sequence[RecordedStep], *, follows_run: bool = False) -> Overheads:
    """Means, so that their sums are right. Dispatch: of launches to a worker that was idle; between: of those that
    were there before the step before had ended, 0 if there are none; report: of all, or with `follows_run` of those
    that were not late, which make stalls.
    """
    dispatch, between = _gaps(steps)
    report = [step.completed_ns - step.end_ns for step in steps]
    stalls = []
    if follows_run:
        late_ns = LATE_REPORTS * sorted(report)[len(report) // 2]
        stalls = _stalls(steps, late_ns)
        report = [ns for ns in report if ns <= late_ns]
    return Overheads(
        dispatch_ns=_mean(dispatch or between), between_ns=_mean(between), report_ns=_mean(report), stalls=stalls
    )


def _gaps(steps: Sequence[RecordedStep]) -> tuple[list[int], list[int]]:
    """Before each step but a worker's first: from its launch where the worker was idle, and from the end of the step
    before where it was not.
    """
    last: dict[tuple[int, int], RecordedStep] = {}
    dispatch: list[int] = []
    between: list[int] = []
    for step in steps:
        before = last.get((step.replica, step.epoch))
        last[step.replica, step.epoch] = step
        if before is None:
            continue
        if step.launched_ns >= before.end_ns:
            dispatch.append(step.start_ns - step.launched_ns)
        else:
            between.append(step.start_ns - before.end_ns)
    return dispatch, between


def _overhead_notes(steps: Sequence[RecordedStep]) -> list[str]:
    """A run whose steps are all long plans none behind another, and an alternative to it may."""
    if _gaps(steps)[1]:
        return []
    return ["no step was launched while another ran: the time between two in a row is not known, and taken to be 0"]


def _stalls(steps: Sequence[RecordedStep], late_ns: int) -> list[tuple[int, int]]:
    """From the ends of steps whose completions were applied late until they were."""
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

    rows = []
    for step in steps:
        prefill_tokens, num_decodes, context_tokens, chunk_context, num_chunks = step.shape
        rows.append((1, num_chunks > 0, prefill_tokens, num_decodes, context_tokens, chunk_context))
    return np.array(rows, dtype=float)


def _defaults() -> Floats:
    """The predictor's, with a first chunk at a quarter of a step."""
    import numpy as np

    base, *others = DEFAULT_COEFFICIENTS
    return np.array([base, base / 4, *others])


def _solve(features: Floats, durations: Floats) -> Floats:
    """Coefficients that are not negative: by weights from the prediction before, the most negative one left out first.

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
        predicted = np.maximum(scaled @ found, 1e-3 * durations.mean())
    # The defaults' little weight has bent the sum a little.
    scale = float(durations.sum() / (scaled @ found).sum())
    return np.asarray(defaults * found * scale)


def _non_negative(rows: Floats, wanted: Floats) -> Floats:
    """Least squares of `rows @ x = wanted`, drawn to x = 1 where nothing else is known."""
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


def _integers(coefficients: Floats) -> list[int]:
    return [max(round(float(value)), 0) for value in coefficients]


def _slowness(windows: Integers, durations: Floats, predicted: Floats) -> Floats:
    """[windows], how much longer than predicted the steps of each took."""
    import numpy as np

    prior = WINDOW_PRIOR_STEPS * durations.mean()
    return np.asarray((np.bincount(windows, durations) + prior) / (np.bincount(windows, predicted) + prior))


def _ratios(durations: Floats, predicted: Floats) -> list[int]:
    """Quantiles of the ratios in ppm, each step counted by its predicted time; their mean is a million.

    A stall of some milliseconds makes a ratio of ten in a step that takes two. Counted by steps, such ratios would be
    drawn for long steps too, and take many times the stall; counted by time they stand for what they cost.
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
    """The windows whose slowness, known from four steps of five, predicts the fifth best, and the mean error then.

    None if the machine's speed did not change so that it would help.
    """
    import numpy as np

    if len(steps) < MIN_STEPS:
        return None, 0.0
    folds = np.arange(len(steps)) % NUM_FOLDS
    predicted = [features @ _solve(features[folds != fold], durations[folds != fold]) for fold in range(NUM_FOLDS)]

    def mean_error(places: Integers) -> float:
        errors = []
        for fold, of_all in enumerate(predicted):
            held = folds == fold
            known = np.where(held, 0.0, 1.0)
            slowness = _slowness(places, durations * known, of_all * known)
            errors.append(np.abs(of_all[held] * slowness[places[held]] / durations[held] - 1))
        return float(np.concatenate(errors).mean())

    best, least = None, mean_error(np.zeros(len(steps), dtype=np.int64))
    for num_mean_steps in WINDOW_STEPS:
        windows = _Windows.over(steps, num_mean_steps)
        error = mean_error(windows.places)
        if error < least:
            best, least = windows, error
    return best, least


def _report(features: Floats, durations: Floats, *, num_left_out: int) -> FitReport:
    import numpy as np

    count = len(durations)
    notes = []
    if count < MIN_STEPS:
        notes.append(f"only {count} steps: how their durations depend on the shape is a guess, their sum is not")
    elif (features == features[0]).all():
        notes.append("all steps have one shape: how durations depend on it is a guess")
    if count < NUM_FOLDS:
        return FitReport(num_steps=count, num_left_out=num_left_out, notes=notes)
    folds = np.arange(count) * NUM_FOLDS // count
    predicted = np.empty(count)
    for fold in range(NUM_FOLDS):
        others = folds != fold
        predicted[~others] = features[~others] @ _solve(features[others], durations[others])
    errors = np.abs(predicted / durations - 1)
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
