"""The result of a what-if, as a table for people and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.formatting import counted
from eventlm.replay.cost.fit_backends import BackendsFit, ErrorsOfTimes
from eventlm.replay.what_if.compare import MODEL_SUFFIX, SERVICE_CLASS_SUFFIX, Cell, Metric
from eventlm.replay.what_if.costs import Fit
from eventlm.replay.what_if.what_if import SetFound, Simulated, WhatIfResult
from eventlm.replay.workload.recorded_policies import describe
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND

#: How many alternatives fit side by side in 120 columns, with one draw and with several, where each has its own error
#: bar. Further ones get another table.
MAX_COLUMNS = 4
MAX_COLUMNS_OF_DRAWS = 2
#: The table refers to an alternative with a longer name by a number.
MAX_NAME_CHARS = 13
MAX_WIDTH = 120
NOT_SIGNIFICANT = "~"
_NOTHING = "-"
_TITLES = {
    "output_tokens_per_second": "output tokens/s",
    "requests_per_second": "requests/s",
    "deadlines_met": "deadlines met",
    "slo_met": "SLO met",
    "fluidity_index": "fluidity index",
    "cut_short": "cut short",
}
_SECTIONS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def render_json(result: WhatIfResult) -> str:
    """One JSON object. Times are nanoseconds, shares parts per million; `metrics` are by name."""
    return msgspec.json.encode(as_object(result), order="deterministic").decode()


def as_object(result: WhatIfResult) -> dict[str, Any]:
    """All that is in the table, and the inputs."""
    comparison = result.comparison
    first = result.sets[0]
    of_sets = {"replicasets": [_replicaset(each) for each in result.sets]} if len(result.sets) > 1 else {}
    return {
        "path": result.path,
        "run": result.header.run,
        "recorded": _engine(first),
        "null_test": result.null,
        "cost_model": first.cost,
        "fit": first.fit,
        **of_sets,
        "objectives_ms": result.objectives,
        "baseline": _simulated(result.baseline),
        "alternatives": [
            _simulated(each) | {"requests": won_lost}
            for each, won_lost in zip(result.alternatives, comparison.won_lost, strict=True)
        ],
        "num_requests": sum(each.num_requests for each in comparison.classes),
        "num_censored": comparison.num_censored,
        "num_draws": comparison.num_draws,
        "closed_loop": result.closed_loop and {"num_clients": result.closed_loop.num_clients},
        "length_classes": comparison.classes,
        "request_error": comparison.request_error,
        "metrics": {metric.name: _metric(metric) for metric in comparison.metrics},
        "notes": result.notes,
        "warnings": result.warnings,
    }


def _replicaset(found: SetFound) -> dict[str, Any]:
    return {"name": found.record.name, **_engine(found), "cost_model": found.cost, "fit": found.fit}


def _engine(found: SetFound) -> dict[str, Any]:
    return {"plugins": _plugins(found), "policies": found.policies, "core": found.record.core}


def _plugins(found: SetFound) -> list[str]:
    """The plug-ins that ran: all policies, and the first of each other kind."""
    first: dict[str, str] = {}
    for record in found.record.plugins:
        first.setdefault(record.kind, format_plugin_spec({"type": record.name} | record.parameters))
    first["policy"] = describe(found.policies, with_parameters=True)
    return [f"{kind} {spec}" for kind, spec in first.items()]


def _simulated(simulated: Simulated) -> dict[str, Any]:
    return {
        "name": simulated.name,
        "description": simulated.description,
        "num_steps": simulated.outcome.num_steps,
        "num_steps_outside": simulated.num_outside,
        "trace": simulated.run_folder or None,
        "notes": simulated.notes,
    }


def _metric(metric: Metric) -> dict[str, Any]:
    fields = msgspec.structs.asdict(metric)
    del fields["name"]
    return fields


def render(result: WhatIfResult) -> str:
    """Lines of at most 120 characters where names are short; without a last newline."""
    return "\n".join(_lines(result))


def _lines(result: WhatIfResult) -> Iterator[str]:
    yield from _head(result)
    count = len(result.alternatives)
    most = MAX_COLUMNS if result.comparison.num_draws == 1 else MAX_COLUMNS_OF_DRAWS
    for first in range(0, count, most):
        yield ""
        yield from _table(result, range(first, min(first + most, count)))
    yield ""
    yield from _legend(result)


def _head(result: WhatIfResult) -> Iterator[str]:
    num_steps = result.recorded.num_steps
    steps = f", {counted(num_steps, 'step')}" if num_steps else ""
    yield f"{result.path}: {counted(result.recorded.num_requests, 'request')}{steps}"
    for index, found in enumerate(result.sets):
        core = found.record.core
        blocks = counted(core.num_blocks, "block")
        size = f"{counted(core.num_replicas, 'replica')}, each {blocks}"
        if core.forwards:
            size = f"up to {counted(core.num_replicas, 'backend')}, each taken to cache {blocks}"
        yield from _labelled(
            "" if index else "recorded", f"{_whose(found, result)}{', '.join(_plugins(found))}; {size}"
        )
    if result.null is not None:
        yield from _labelled(
            "null test", f"passed: {counted(result.null.num_decisions, 'decision')} came out as recorded"
        )
    for index, found in enumerate(result.sets):
        yield from _labelled("" if index else "cost model", _whose(found, result) + _cost(found.fit))
    for heading, each in zip(_headings(result.alternatives), result.alternatives, strict=True):
        if heading != each.description:
            yield from _labelled(heading, each.description or "nothing changed")


def _labelled(label: str, text: str) -> list[str]:
    indent = " " * (MAX_NAME_CHARS + 2)
    return textwrap.wrap(text, MAX_WIDTH, initial_indent=f"{label:<{len(indent)}}", subsequent_indent=indent)


def _whose(found: SetFound, result: WhatIfResult) -> str:
    """A replicaset and its model, if there are several."""
    return f"{found.record.name} ({found.record.core.models[0]}): " if len(result.sets) > 1 else ""


def _cost(fit: Fit | None) -> str:
    if fit is None:
        return "as given, not fitted to this run"
    if isinstance(fit, BackendsFit):
        return "; ".join(_backends(fit))
    held_out = f"held-out error {fit.mean:.1%} a step (median {fit.median:.1%}, p95 {fit.p95:.1%})"
    if fit.mean_near < fit.mean / 2:
        held_out += f", {fit.mean_near:.1%} with the machine's pace known"
    if not fit.mean:
        held_out = "too few for a held-out error"
    return "; ".join([f"fitted on {counted(fit.num_steps, 'step')}, {held_out}", *fit.notes])


def _backends(fit: BackendsFit) -> Iterator[str]:
    yield f"fitted on {counted(fit.num_answers, 'answer')} of {counted(fit.num_servers, 'backend')}"
    yield f"held-out error of a first token {_errors(fit.first)}"
    if fit.tokens is not None:
        yield f"of the time between tokens {_errors(fit.tokens)}"
    if fit.num_pooled:
        yield f"{counted(fit.num_pooled, 'backend')} with too few answers, so fitted with the others"
    yield from fit.notes


def _errors(errors: ErrorsOfTimes) -> str:
    return f"{errors.mean:.1%} (median {errors.median:.1%}, p95 {errors.p95:.1%})"


def _headings(alternatives: Sequence[Simulated]) -> list[str]:
    if all(len(each.name) <= MAX_NAME_CHARS for each in alternatives):
        return [each.name for each in alternatives]
    return [f"[{index}]" for index in range(1, len(alternatives) + 1)]


def _table(result: WhatIfResult, indices: range) -> Iterator[str]:
    headings = _headings(result.alternatives)
    columns = ["", "recorded", "baseline", "error bar", *(headings[index] for index in indices)]
    rows = []
    titles = _titles(result)
    has_bars = result.comparison.num_draws > 1
    for metric in result.comparison.metrics:
        if metric.recorded is None and metric.baseline is None:
            continue
        cells = [_cell(metric, metric.alternatives[index], has_bar=has_bars) for index in indices]
        bar = _bar(metric, metric.error_bar, metric.baseline)
        values = [_value(metric, metric.recorded), _value(metric, metric.baseline), bar]
        rows.append([titles[metric.name], *values, *cells])
    won_lost = [result.comparison.won_lost[index] for index in indices]
    rows.append(["requests won", "", "", "", *(f"{each.num_won:,}      " for each in won_lost)])
    rows.append(["requests lost", "", "", "", *(f"{each.num_lost:,}      " for each in won_lost)])
    rows.append(["not compared", "", "", "", *(f"{each.num_censored:,}      " for each in won_lost)])
    outside = [result.baseline, *(result.alternatives[index] for index in indices)]
    shares = [f"{each.num_outside / max(each.num_seen, 1):.1%}" for each in outside]
    what = "steps" if result.recorded.num_steps else "attempts"
    rows.append([f"{what} unlike any recorded", "", shares[0], "", *(f"{share}      " for share in shares[1:])])
    yield from table(columns, rows)


def _titles(result: WhatIfResult) -> dict[str, str]:
    classes = {each.name: each for each in result.comparison.classes}
    found = {}
    for metric in result.comparison.metrics:
        suffix = MODEL_SUFFIX if MODEL_SUFFIX in metric.name else SERVICE_CLASS_SUFFIX
        general, is_of_part, part = metric.name.partition(suffix)
        latency, _, rest = general.partition("_")
        quantile, _, name = rest.partition("_")
        if is_of_part:
            title = _TITLES.get(general, f"{_SECTIONS.get(latency, latency)} {quantile}")
            found[metric.name] = f"{title}, {part}"
        elif metric.unit != "ns":
            found[metric.name] = _TITLES.get(metric.name, metric.name)
        elif not name:
            found[metric.name] = f"{_SECTIONS[latency]} {quantile}, ms"
        else:
            of = classes[name]
            tokens = f"{of.min_tokens}-{of.max_tokens}" if of.min_tokens < of.max_tokens else f"{of.min_tokens}"
            found[metric.name] = f"{_SECTIONS[latency]} {quantile}, {name} {tokens}"
    return found


def _value(metric: Metric, value: float | None) -> str:
    if value is None:
        return _NOTHING
    if metric.unit == "ppm":
        return f"{value / 1e6:.1%}"
    if metric.unit == "count":
        return f"{value:,}"
    number = value / NANOSECONDS_PER_MILLISECOND if metric.unit == "ns" else value
    decimals = 0 if number >= 1000 else 1 if number >= 100 else 2
    return f"{number:,.{decimals}f}"


def _bar(metric: Metric, bar: float | None, value: float | None) -> str:
    """Half the width of an error bar around a value: percent of it, points of a share, or a number."""
    if bar is None:
        return _NOTHING
    if metric.unit == "ppm":
        return f"{bar / 1e4:.1f}"
    if metric.unit == "count":
        return f"{bar:,.0f}"
    return f"{bar / value:.1%}" if value else f"{bar:.2f}"


def _cell(metric: Metric, cell: Cell, *, has_bar: bool) -> str:
    """The value, its error bar, and the difference from the baseline: percent, points of a share, or a number."""
    bar = ""
    if has_bar:
        bar = " " * 8 if cell.error_bar is None else f" ±{_bar(metric, cell.error_bar, cell.value):<6}"
    if cell.value is None or cell.difference is None:
        return f"{_value(metric, cell.value)}{' ' * len(bar)}      "
    if not cell.is_significant:
        change = NOT_SIGNIFICANT
    elif metric.unit == "ppm":
        change = f"{cell.difference / 1e4:+.1f}"
    elif metric.unit == "count" or not metric.baseline:
        change = f"{cell.difference:+,}"
    elif cell.value > 10 * metric.baseline:
        change = f"x{cell.value / metric.baseline:.0f}"
    else:
        share = cell.difference / metric.baseline
        change = f"{share:+.0%}" if abs(share) >= 0.01 else f"{share:+.1%}"
    return f"{_value(metric, cell.value)}{bar} {change:>5}"


def _legend(result: WhatIfResult) -> Iterator[str]:
    comparison = result.comparison
    is_paced = any(metric.baseline_unpaced is not None for metric in comparison.metrics)
    witness = ", or its error without knowing when the machine was slow if that is larger" if is_paced else ""
    texts = [
        f"Baseline: the recorded engine with modelled durations; the error bar is what it is off by{witness}. Changes "
        f"are from the baseline (shares: points); {NOT_SIGNIFICANT} is one that the error bar explains.",
        f"Won, lost: end to end by more than {comparison.request_error:.1%}, within which nine in ten requests of the "
        "baseline are as recorded.",
    ]
    if comparison.num_censored:
        texts.append(
            f"The run does not show the length of {counted(comparison.num_censored, 'request')} (rejected, cut short "
            "or unfinished): it is drawn from requests of the same class and prompt length, and they neither win nor "
            "lose."
        )
    if comparison.num_draws > 1:
        texts.append(
            f"Each engine ran {comparison.num_draws} times, each time with another draw of what the run does not "
            "determine: durations of steps, unknown lengths, and how long clients wait. Values are medians of the "
            "draws, and ± includes their spread."
        )
    for text in texts:
        yield textwrap.fill(text, MAX_WIDTH)
    has_value = {metric.name for metric in comparison.metrics if metric.recorded is not None}
    if "slo_met" not in has_value:
        yield "For SLO attainment and the fluidity index say what is fast enough: --slo ttft=500,tpot=100."
    elif "fluidity_index" not in has_value:
        yield "The fluidity index needs both objectives: --slo ttft=500,tpot=100."
    yield from _notes(result)
    for each in result.alternatives:
        if each.run_folder:
            yield f"Trace of {each.name}: {each.run_folder}"


def _notes(result: WhatIfResult) -> Iterator[str]:
    """Each note once, with the alternatives that it is about."""
    about: dict[str, list[str]] = {note: [] for note in result.notes}
    headings = _headings(result.alternatives)
    for heading, each in zip(headings, result.alternatives, strict=True):
        for note in each.notes:
            about.setdefault(note, []).append(heading)
    for note, of in about.items():
        whom = f" on {', '.join(of)}" if len(of) < len(headings) and of else ""
        yield textwrap.fill(f"Note{whom}: {note}.", MAX_WIDTH)
