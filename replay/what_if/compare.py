"""Runs of one workload side by side: metrics with error bars, and who won and who lost.

The baseline is the run's own engine with modelled durations, so what it is off by is what the model is off by. That is
the error bar: a difference between an alternative and the baseline which is not larger shows nothing. Durations that
follow the run's own pace know more of the run than of an alternative, whose steps are others: then the same engine with
durations that know nothing of the pace is a second witness, and the larger of the two errors counts. A quantile can be
right by luck, so the bar of a latency's quantile is at least the middle one of that latency's errors.

Requests whose length the run does not show are in no latency, in none of the runs: what they would have come to is not
known, and an alternative that is faster than the run may bring them to an end that is not theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct

from eventlm.replay.outcome import RunOutcome, SequenceOutcome
from eventlm.replay.workload.workload import Workload

#: Of each latency of `outcome.LATENCIES` that is shown.
QUANTILES = ("p50", "p90", "p99")
SHOWN_LATENCIES = ("ttft", "tpot", "e2e")
#: Shares of the requests, by prompt length, that are short, medium and long.
CLASS_SHARES = (("short", 50), ("medium", 90), ("long", 100))
#: Of so many service classes it is told how they fare.
MAX_SERVICE_CLASSES = 8
#: Before a service class in the name of a metric.
SERVICE_CLASS_SUFFIX = "_class_"
#: So many percent of the requests differ from the record by less than the bar for won and lost.
REQUEST_ERROR_PERCENT = 90

Unit = Literal["ns", "per_second", "ppm", "count"]
Better = Literal["lower", "higher"]


class Ran(NamedTuple):
    """A run, the place in the workload of each of its requests by their seq there, and how many requests did not end:
    they were still under way, or never arrived because what they go on from did not end.
    """

    outcome: RunOutcome
    places: dict[int, int]
    num_unfinished: int


class LengthClass(Struct, frozen=True, kw_only=True):
    """Requests whose prompts have so many tokens, ends included."""

    name: str
    min_tokens: int
    max_tokens: int
    num_requests: int


class Cell(Struct, frozen=True, kw_only=True):
    """A metric of an alternative. difference: from the baseline. None where there is nothing to measure."""

    value: float | int | None
    difference: float | int | None
    is_significant: bool


class Metric(Struct, frozen=True, kw_only=True):
    """A metric of all runs. baseline_unpaced: of the second witness, None where there is none. error_bar: in the
    metric's own unit, None where the record or the baseline has no value.
    """

    name: str
    unit: Unit
    better: Better
    recorded: float | int | None
    baseline: float | int | None
    baseline_unpaced: float | int | None
    error_bar: float | None
    alternatives: list[Cell]


class WonLost(Struct, frozen=True, kw_only=True):
    """Requests whose end-to-end time is shorter or longer than in the baseline by more than `Comparison.request_error`.

    num_censored: requests that are not compared: what they would have produced is not known, or they were cut short.
    """

    num_won: int
    num_lost: int
    num_equal: int
    num_censored: int


class Comparison(Struct, frozen=True, kw_only=True):
    """Everything about alternatives, in their order. request_error: relative, of a request's end-to-end time: what nine
    in ten requests of the baseline (of the worse one of two) differ by from the record, at most. num_censored: requests
    whose lengths the run does not show: they were rejected, cut short or still under way at its end.
    """

    metrics: list[Metric]
    classes: list[LengthClass]
    request_error: float
    won_lost: list[WonLost]
    num_censored: int


class _Kind(NamedTuple):
    """What a metric is of a run. `family`: those whose errors are looked at together."""

    name: str
    unit: Unit
    better: Better
    of: Callable[[_Compared], float | int | None]
    family: str = ""


class _Compared(NamedTuple):
    """A run, those of its sequences whose latencies count, and how many requests were cut short."""

    ran: Ran
    sequences: list[SequenceOutcome]
    num_cut_short: int

    @property
    def outcome(self) -> RunOutcome:
        return self.ran.outcome


def compare(
    workload: Workload, recorded: Ran, baseline: Ran, alternatives: Sequence[Ran], *, unpaced: Ran | None = None
) -> Comparison:
    """Compare runs of a workload. unpaced: the second witness of the error."""
    classes = length_classes([request.arrival.prompt_tokens for request in workload.requests])
    kinds = _kinds(classes, service_classes(workload))
    witnesses = [baseline] if unpaced is None else [baseline, unpaced]
    runs = [_compared(workload, run) for run in (recorded, *witnesses, *alternatives)]
    values = [[kind.of(run) for run in runs] for kind in kinds]
    num_witnesses = len(witnesses)
    errors = [_relative_error(of_kind[0], of_kind[1 : 1 + num_witnesses]) for of_kind in values]
    metrics = []
    for place, (kind, of_kind) in enumerate(zip(kinds, values, strict=True)):
        of_family = [
            error
            for other, error in zip(kinds, errors, strict=True)
            if kind.family and other.family == kind.family and error is not None
        ]
        error = errors[place]
        relative = max([error, median(of_family)]) if of_family and error is not None else None
        metrics.append(_metric(kind, of_kind, num_witnesses, relative))
    times = [_request_times(workload, run) for run in runs]
    request_error = max(_request_error(times[0], of_witness) for of_witness in times[1 : 1 + num_witnesses])
    return Comparison(
        metrics=metrics,
        classes=classes,
        request_error=request_error,
        won_lost=[_won_lost(workload, times[1], found, request_error) for found in times[1 + num_witnesses :]],
        num_censored=sum(request.is_censored for request in workload.requests),
    )


def length_classes(prompt_tokens: Sequence[int]) -> list[LengthClass]:
    """The shorter half, the longest tenth, and what lies between; without those that nobody is in."""
    ordered = sorted(prompt_tokens)
    found = []
    above = -1
    for name, percent in CLASS_SHARES:
        longest = ordered[-(-len(ordered) * percent // 100) - 1]
        within = [tokens for tokens in ordered if above < tokens <= longest]
        if within:
            found.append(LengthClass(name=name, min_tokens=within[0], max_tokens=within[-1], num_requests=len(within)))
            above = longest
    return found


def _kinds(classes: Sequence[LengthClass], service_classes: Sequence[str]) -> list[_Kind]:
    found = [_latency(latency, quantile) for latency in SHOWN_LATENCIES for quantile in QUANTILES]
    found += [
        _Kind("output_tokens_per_second", "per_second", "higher", lambda run: run.outcome.output_tokens_per_second),
        _Kind("requests_per_second", "per_second", "higher", lambda run: run.outcome.requests_per_second),
        _Kind("deadlines_met", "ppm", "higher", lambda run: run.outcome.deadlines_met_ppm),
        _Kind("slo_met", "ppm", "higher", lambda run: run.outcome.objectives_met_ppm),
        _Kind("fluidity_index", "ppm", "higher", lambda run: run.outcome.fluidity_ppm),
        _Kind("preemptions", "count", "lower", lambda run: run.outcome.num_preemptions),
        _Kind("rejected", "count", "lower", lambda run: sum(run.outcome.reject_reasons.values())),
        _Kind("cut_short", "count", "lower", lambda run: run.num_cut_short),
        _Kind("unfinished", "count", "lower", lambda run: run.ran.num_unfinished),
    ]
    for each in classes:
        found += [_latency("ttft", quantile, each) for quantile in ("p50", "p99")]
    for name in service_classes:
        found += _of_service_class(name)
    return found


def _of_service_class(name: str) -> list[_Kind]:
    suffix = SERVICE_CLASS_SUFFIX + name

    def ttft(quantile: str) -> _Kind:
        def of(run: _Compared) -> int | None:
            found = run.outcome.latency("ttft", [each for each in run.sequences if each.service_class == name])
            return None if found is None else int(getattr(found, quantile))

        return _Kind(f"ttft_{quantile}{suffix}", "ns", "lower", of, family=f"ttft{suffix}")

    return [
        *(ttft(quantile) for quantile in ("p50", "p99")),
        _Kind(f"deadlines_met{suffix}", "ppm", "higher", lambda run: run.outcome.of_class(name).deadlines_met_ppm),
        _Kind(f"slo_met{suffix}", "ppm", "higher", lambda run: run.outcome.of_class(name).objectives_met_ppm),
    ]


def service_classes(workload: Workload) -> list[str]:
    """Those of the most requests, in order of name."""
    counts = Counter(request.arrival.service_class for request in workload.requests if request.arrival.service_class)
    most = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_SERVICE_CLASSES]
    return sorted(most)


def _latency(latency: str, quantile: str, of_class: LengthClass | None = None) -> _Kind:
    def of(run: _Compared) -> int | None:
        sequences = run.sequences
        if of_class is not None:
            sequences = [s for s in sequences if of_class.min_tokens <= s.prompt_tokens <= of_class.max_tokens]
        found = run.outcome.latency(latency, sequences)
        return None if found is None else int(getattr(found, quantile))

    suffix = f"_{of_class.name}" if of_class is not None else ""
    return _Kind(f"{latency}_{quantile}{suffix}", "ns", "lower", of, family=latency + suffix)


def _compared(workload: Workload, ran: Ran) -> _Compared:
    """Only what has to do with requests of the workload."""
    sequences = []
    cut_short = set()
    for found in ran.outcome.sequences:
        place = ran.places.get(found.request)
        if place is None:
            continue
        request = workload.requests[place]
        if not request.is_censored:
            sequences.append(found)
        # Who was not cancelled in the run is cancelled in a simulation because nothing more of it is known.
        if not found.is_complete and (found.reason != "cancelled" or request.cancel is not None):
            cut_short.add(found.request)
    return _Compared(ran, sequences, len(cut_short))


def _relative_error(recorded: float | None, witnesses: Sequence[float | None]) -> float | None:
    """The largest, of those that have a value; None if the first has none."""
    if recorded is None or witnesses[0] is None:
        return None
    return max(abs(each - recorded) / recorded if recorded else 0.0 for each in witnesses if each is not None)


def _metric(kind: _Kind, values: Sequence[float | int | None], num_witnesses: int, relative: float | None) -> Metric:
    """`relative`: the relative error, where the metric is one that has such."""
    recorded, baseline = values[:2]
    witnesses = values[1 : 1 + num_witnesses]
    bar: float | None = None
    if recorded is not None and baseline is not None:
        bar = max(abs(each - recorded) for each in witnesses if each is not None)
        bar = bar if relative is None else max(relative * baseline, bar)
    return Metric(
        name=kind.name,
        unit=kind.unit,
        better=kind.better,
        recorded=recorded,
        baseline=baseline,
        baseline_unpaced=witnesses[1] if num_witnesses > 1 else None,
        error_bar=bar,
        alternatives=[_cell(value, baseline, bar) for value in values[1 + num_witnesses :]],
    )


def _cell(value: float | int | None, baseline: float | int | None, bar: float | None) -> Cell:
    difference = None if value is None or baseline is None else value - baseline
    is_significant = difference is not None and bar is not None and abs(difference) > bar
    return Cell(value=value, difference=difference, is_significant=is_significant)


def _request_times(workload: Workload, run: _Compared) -> dict[int, int]:
    """End-to-end times in ns by place, of requests whose length is known and that ran to their end: that of the last
    of their sequences.
    """
    num_left = [request.arrival.n for request in workload.requests]
    times: dict[int, int] = {}
    for found in run.sequences:
        if found.is_complete:
            place = run.ran.places[found.request]
            num_left[place] -= 1
            times[place] = max(times.get(place, 0), found.e2e_ns)
    return {place: time_ns for place, time_ns in times.items() if not num_left[place]}


def _request_error(recorded: dict[int, int], baseline: dict[int, int]) -> float:
    """What nine in ten requests of the baseline differ by from the record, at most."""
    errors = sorted(
        abs(baseline[place] - time_ns) / time_ns for place, time_ns in recorded.items() if place in baseline and time_ns
    )
    return errors[-(-len(errors) * REQUEST_ERROR_PERCENT // 100) - 1] if errors else 0.0


def _won_lost(workload: Workload, baseline: dict[int, int], found: dict[int, int], error: float) -> WonLost:
    num_won = num_lost = num_compared = 0
    for place, time_ns in found.items():
        before_ns = baseline.get(place)
        if before_ns is None:
            continue
        num_compared += 1
        if abs(time_ns - before_ns) > error * before_ns:
            num_won += time_ns < before_ns
            num_lost += time_ns > before_ns
    return WonLost(
        num_won=num_won,
        num_lost=num_lost,
        num_equal=num_compared - num_won - num_lost,
        num_censored=len(workload.requests) - num_compared,
    )
