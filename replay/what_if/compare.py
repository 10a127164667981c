"""Runs of one workload side by side: metrics with error bars, and which requests won and which lost.

The baseline is the run's own engine with modelled durations. Its distance from the record is the model's error, so a
smaller difference between an alternative and the baseline is not significant (`error_bars`). Durations that follow the
run's own pace fit the run better than an alternative, whose steps differ. In that case the same engine also runs with
durations that ignore the pace (`unpaced`), and the larger of the two errors counts.

Each engine runs once for each draw of what the run does not show: unknown lengths, and the durations that another run
would have had. A metric is the median over the draws.

Every run is measured by the requests that it served, as the record is, whether their lengths are known or drawn.
Requests that were still under way at the end of the record are left out of all runs. Only requests of known length
count as won or lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from operator import methodcaller
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from eventlm.replay.outcome import RunOutcome
from eventlm.replay.what_if.error_bars import Measured, Value, error_bars, middle
from eventlm.replay.workload.workload import Workload

#: Shown for each latency in SHOWN_LATENCIES.
QUANTILES = ("p50", "p90", "p99")
SHOWN_LATENCIES = ("ttft", "tpot", "e2e")
#: Upper bounds, in percent of the requests ordered by prompt length, of the short, medium and long ones.
CLASS_SHARES = (("short", 50), ("medium", 90), ("long", 100))
#: At most this many service classes get metrics of their own.
MAX_SERVICE_CLASSES = 8
#: Separate a metric's name from the service class, or from the model, that it is for.
SERVICE_CLASS_SUFFIX = "_class_"
MODEL_SUFFIX = "_model_"
#: This percentage of the requests differs from the record by less than the bar for won and lost.
REQUEST_ERROR_PERCENT = 90

Unit = Literal["ns", "per_second", "ppm", "count"]
Better = Literal["lower", "higher"]


class Ran(NamedTuple):
    """A run, the index in the workload of each of its requests by seq, and how many requests did not end: they were
    still under way, or never arrived because the turn before them did not end.
    """

    outcome: RunOutcome
    indices: dict[int, int]
    num_unfinished: int


class LengthClass(Struct, frozen=True, kw_only=True):
    """Requests whose prompts have from `min_tokens` to `max_tokens` tokens."""

    name: str
    min_tokens: int
    max_tokens: int
    num_requests: int


class Cell(Struct, frozen=True, kw_only=True):
    """A metric of an alternative. difference: from the baseline. error_bar: of the value and of the difference, in the
    metric's own unit. None if there is nothing to measure.
    """

    value: Value
    difference: Value
    error_bar: float | None
    is_significant: bool


class Metric(Struct, frozen=True, kw_only=True):
    """A metric of all runs. baseline_unpaced: of the baseline that ignores the run's pace, None if there is none.
    error_bar: of the baseline, in the metric's own unit; None if the record or the baseline has no value.
    """

    name: str
    unit: Unit
    better: Better
    recorded: Value
    baseline: Value
    baseline_unpaced: Value
    error_bar: float | None
    alternatives: list[Cell]


class WonLost(Struct, frozen=True, kw_only=True):
    """Requests whose end-to-end time is shorter or longer than in the baseline by more than `Comparison.request_error`.

    num_censored: requests that are not compared, because their lengths are not known or they did not end by themselves.
    """

    num_won: int
    num_lost: int
    num_equal: int
    num_censored: int


class Comparison(Struct, frozen=True, kw_only=True):
    """Everything about alternatives, in their order.

    request_error: the relative error of a request's end-to-end time that nine in ten requests of the baseline (of the
    worse one of two) do not exceed. num_censored: requests whose lengths the run does not show, because they were
    rejected, cut short or still under way at its end. num_draws: how many times each engine ran.
    """

    metrics: list[Metric]
    classes: list[LengthClass]
    request_error: float
    won_lost: list[WonLost]
    num_censored: int
    num_draws: int = 1


class _Kind(NamedTuple):
    """How a metric is computed from a run. `family`: metrics whose errors are judged together."""

    name: str
    unit: Unit
    better: Better
    of: Callable[[_Compared], Value]
    family: str = ""


class _Compared(NamedTuple):
    """A run, its outcome without requests that are under way at the end of the record, and how many were cut short."""

    ran: Ran
    outcome: RunOutcome
    num_cut_short: int


def compare(
    workload: Workload,
    recorded: Ran,
    baseline: Sequence[Ran],
    alternatives: Sequence[Sequence[Ran]],
    *,
    unpaced: Sequence[Ran] = (),
) -> Comparison:
    """Compare runs of a workload. Each engine has a run for every draw of what the record does not show; all have the
    same draws. unpaced: the baseline that ignores the run's pace, if there is one.
    """
    classes = length_classes([request.arrival.prompt_tokens for request in workload.requests])
    kinds = _kinds(classes, service_classes(workload), _models(workload))
    record = _compared(workload, recorded)
    engines = [[_compared(workload, ran) for ran in runs] for runs in (baseline, unpaced, *alternatives)]
    measured = [
        Measured(
            kind.family,
            kind.unit in ("ns", "per_second"),
            {"count": 1.0, "ppm": 1e6 / len(workload.requests)}.get(kind.unit, 0.0),
            kind.of(record),
            [[kind.of(run) for run in runs] for runs in engines],
        )
        for kind in kinds
    ]
    metrics = [_metric(*each) for each in zip(kinds, measured, error_bars(measured), strict=True)]
    known = {index for index, request in enumerate(workload.requests) if not request.has_unknown_length}
    times = [_request_times(workload, runs[0], known) if runs else {} for runs in engines]
    recorded_times = _request_times(workload, record, known)
    request_error = max(_request_error(recorded_times, found) for found in times[:2])
    return Comparison(
        metrics=metrics,
        classes=classes,
        request_error=request_error,
        won_lost=[_won_lost(workload, times[0], found, request_error) for found in times[2:]],
        num_censored=len(workload.requests) - len(known),
        num_draws=len(baseline),
    )


def length_classes(prompt_tokens: Sequence[int]) -> list[LengthClass]:
    """The shorter half, the longest tenth, and those between; without empty classes."""
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


def _kinds(
    classes: Sequence[LengthClass], service_classes: Sequence[str], models: Sequence[tuple[int, str]]
) -> list[_Kind]:
    found = [_latency(latency, quantile) for latency in SHOWN_LATENCIES for quantile in QUANTILES]
    found += [
        _Kind("output_tokens_per_second", "per_second", "higher", lambda run: run.ran.outcome.output_tokens_per_second),
        _Kind("requests_per_second", "per_second", "higher", lambda run: run.ran.outcome.requests_per_second),
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
        found += _of_part(SERVICE_CLASS_SUFFIX + name, ("ttft",), methodcaller("of_class", name))
    for number, model in models:
        suffix, choose = MODEL_SUFFIX + model, methodcaller("of_replicaset", number)
        found.append(_output_rate(suffix, choose))
        found += _of_part(suffix, SHOWN_LATENCIES, choose)
    return found


def _of_part(suffix: str, latencies: Sequence[str], choose: Callable[[RunOutcome], RunOutcome]) -> list[_Kind]:
    """Metrics of the part of a run that `choose` takes."""

    def quantile_of(latency: str, quantile: str) -> _Kind:
        def of(run: _Compared) -> int | None:
            found = choose(run.outcome).latency(latency)
            return None if found is None else int(getattr(found, quantile))

        return _Kind(f"{latency}_{quantile}{suffix}", "ns", "lower", of, family=f"{latency}{suffix}")

    return [
        *(quantile_of(latency, quantile) for latency in latencies for quantile in ("p50", "p99")),
        _Kind(f"deadlines_met{suffix}", "ppm", "higher", lambda run: choose(run.outcome).deadlines_met_ppm),
        _Kind(f"slo_met{suffix}", "ppm", "higher", lambda run: choose(run.outcome).objectives_met_ppm),
    ]


def _output_rate(suffix: str, choose: Callable[[RunOutcome], RunOutcome]) -> _Kind:
    return _Kind(
        f"output_tokens_per_second{suffix}",
        "per_second",
        "higher",
        lambda run: choose(run.ran.outcome).output_tokens_per_second,
    )


def _models(workload: Workload) -> list[tuple[int, str]]:
    """The replicasets with requests, by number and model; empty if there is only one set."""
    if len(workload.recorded) < 2:
        return []
    numbers = {request.arrival.replicaset for request in workload.requests}
    return [(number, core.models[0]) for number, core in enumerate(workload.recorded.values()) if number in numbers]


def service_classes(workload: Workload) -> list[str]:
    """The classes with the most requests, in order of name."""
    counts = Counter(
        request.arrival.scheduling.service_class
        for request in workload.requests
        if request.arrival.scheduling.service_class
    )
    most = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_SERVICE_CLASSES]
    return sorted(most)


def _latency(latency: str, quantile: str, of_class: LengthClass | None = None) -> _Kind:
    def of(run: _Compared) -> int | None:
        sequences = run.outcome.sequences
        if of_class is not None:
            sequences = [s for s in sequences if of_class.min_tokens <= s.prompt_tokens <= of_class.max_tokens]
        found = run.outcome.latency(latency, sequences)
        return None if found is None else int(getattr(found, quantile))

    suffix = f"_{of_class.name}" if of_class is not None else ""
    return _Kind(f"{latency}_{quantile}{suffix}", "ns", "lower", of, family=latency + suffix)


def _compared(workload: Workload, ran: Ran) -> _Compared:
    """The part of a run that is about requests whose end lies in the record."""
    sequences = []
    for found in ran.outcome.sequences:
        index = ran.indices.get(found.request)
        if index is not None and not workload.requests[index].is_unfinished:
            sequences.append(found)
    num_cut_short = len({found.request for found in sequences if not found.is_complete})
    return _Compared(ran, structs.replace(ran.outcome, sequences=sequences), num_cut_short)


def _metric(kind: _Kind, measured: Measured, bars: Sequence[float | None]) -> Metric:
    baseline, unpaced, *alternatives = (middle(draws) for draws in measured.engines)
    return Metric(
        name=kind.name,
        unit=kind.unit,
        better=kind.better,
        recorded=measured.recorded,
        baseline=baseline,
        baseline_unpaced=unpaced,
        error_bar=bars[0],
        alternatives=[_cell(value, baseline, bar) for value, bar in zip(alternatives, bars[2:], strict=True)],
    )


def _cell(value: Value, baseline: Value, bar: float | None) -> Cell:
    difference = None if value is None or baseline is None else value - baseline
    is_significant = difference is not None and bar is not None and abs(difference) > bar
    return Cell(value=value, difference=difference, error_bar=bar, is_significant=is_significant)


def _request_times(workload: Workload, run: _Compared, known: Container[int]) -> dict[int, int]:
    """End-to-end times in ns of the requests at the `known` indices that ran to their end, by index."""
    num_left = [request.arrival.n for request in workload.requests]
    times: dict[int, int] = {}
    for found in run.outcome.sequences:
        index = run.ran.indices[found.request]
        if found.is_complete and index in known:
            num_left[index] -= 1
            times[index] = max(times.get(index, 0), found.e2e_ns)
    return {index: time_ns for index, time_ns in times.items() if not num_left[index]}


def _request_error(recorded: dict[int, int], baseline: dict[int, int]) -> float:
    """The relative difference from the record that nine in ten requests of the baseline do not exceed."""
    errors = sorted(
        abs(baseline[index] - time_ns) / time_ns for index, time_ns in recorded.items() if index in baseline and time_ns
    )
    return errors[-(-len(errors) * REQUEST_ERROR_PERCENT // 100) - 1] if errors else 0.0


def _won_lost(workload: Workload, baseline: dict[int, int], found: dict[int, int], error: float) -> WonLost:
    num_won = num_lost = num_compared = 0
    for index, time_ns in found.items():
        before_ns = baseline.get(index)
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
