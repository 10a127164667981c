"""The report of a simulation, as text and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventlm.cli.trace_path import plugin_in_words
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.formatting import counted
from eventlm.table import aligned, table

if TYPE_CHECKING:
    from eventlm.events import ReplicasetRecord
    from eventlm.metrics.trace_metrics import Distribution
    from eventlm.replay.simulate.simulation import SimulationResult
    from eventlm.replay.simulate.summary import SimulationSummary

_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "queue": "queued"}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_CLASS_COLUMNS = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2e", "p50"), ("e2e", "p99"))


def as_object(result: SimulationResult, notes: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints. Times in ns, shares in parts per million."""
    header = result.header
    sets = {each.name: _set_as_object(each) for each in header.sets}
    return {
        "run": header.run,
        "run_folder": result.run_folder,
        **sets[header.sets[0].name],
        **({"replicasets": sets} if len(sets) > 1 else {}),
        "simulated": header.host["simulated"],
        "notes": list(notes),
        "num_events": result.num_events,
        "summary": result.summary,
    }


def _set_as_object(found: ReplicasetRecord) -> dict[str, Any]:
    return {
        "core": found.core,
        # The first of a kind is in force at the start; extra policies follow it.
        "plugins": {record.kind: {"type": record.name, **record.parameters} for record in reversed(found.plugins)},
        "predictor": found.predictor,
    }


def render(
    result: SimulationResult, *, workload: str, cost_model: str, slo: str, notes: Sequence[str]
) -> Iterator[str]:
    """The lines of the report."""
    lines = [
        ("workload", workload),
        ("engine", _engine(result)),
        ("cost model", cost_model),
        *_figures(result.summary, slo),
    ]
    if result.run_folder:
        lines.append(("trace", f"{result.run_folder}, {counted(result.num_events, 'event')}"))
    lines += [("note", note) for note in notes]
    yield from aligned(lines)
    yield ""
    yield from _latency_table(result.summary)
    if len(result.summary.classes) > 1:
        yield ""
        yield from _class_table(result.summary)
    if result.summary.replicasets:
        yield ""
        yield from _replicaset_table(result.summary)


def _engine(result: SimulationResult) -> str:
    sets, layouts, numbers = result.header.sets, recorded_layouts(result.header), result.header.sets_of_replicas()
    engines = [_engine_of_set(each, layouts[numbers.index(number)].describe()) for number, each in enumerate(sets)]
    if len(engines) == 1:
        return engines[0]
    return "; ".join(f"{each.name}: {engine}" for each, engine in zip(sets, engines, strict=True))


def _engine_of_set(found: ReplicasetRecord, ranks: str) -> str:
    core = found.core
    chosen = ", ".join(map(plugin_in_words, found.plugins))
    in_each = " in each KV group" if core.groups > 1 else ""
    return (
        f"{chosen}; {counted(core.num_replicas, 'replica')} of {core.num_blocks:,} blocks of {core.block_size} tokens"
        f"{in_each}, context {core.max_model_len:,}{f'; split into {ranks}' if ranks else ''}"
    )


def _figures(s: SimulationSummary, slo: str) -> list[tuple[str, str]]:
    seconds = s.duration_ns / 1e9
    speed = f", {seconds * 1e9 / s.wall_ns:,.0f} times as fast" if s.wall_ns else ""
    steps = f"{s.num_steps:,}, replicas busy {s.busy_ppm / 1e4:.1f} %; {s.steps_per_second:,.0f} steps/s here"
    found = [
        ("requests", _requests(s)),
        ("duration", f"{seconds:,.1f} s simulated in {s.wall_ns / 1e9:,.2f} s{speed}"),
        # Other servers tell of none.
        *([("steps", steps)] if s.num_steps else []),
        ("tokens", f"{s.prompt_tokens:,} prompt, {s.output_tokens:,} output"),
        ("requests/s", f"{s.requests_per_second:.2f}"),
        ("output tokens/s", f"{s.output_tokens_per_second:,.1f}"),
        ("preemptions", f"{s.num_preemptions:,}"),
    ]
    if s.hit_ppm is not None:
        found.append(("cache hits", f"{s.hit_ppm / 1e4:.1f} % of the prompt tokens"))
    if s.deadlines_met_ppm is not None:
        found.append(("deadlines met", f"{s.deadlines_met_ppm / 1e4:.1f} %"))
    if s.objectives_met_ppm is not None:
        within = f" within {slo}" if slo else " within the requests' own"
        rate = s.requests_per_second * s.objectives_met_ppm / 1e6
        found.append(("goodput", f"{rate:.2f} requests/s ({s.objectives_met_ppm / 1e4:.1f} %){within}"))
    if s.fluidity_ppm is not None:
        found.append(("fluidity", f"{s.fluidity_ppm / 1e4:.2f} % of the tokens came in time"))
    return found


def _requests(s: SimulationSummary) -> str:
    parts = [f"{counted(s.num_complete, 'sequence')} ran to the end"]
    parts += [f"{number:,} rejected ({reason})" for reason, number in s.reject_reasons.items()]
    parts += [f"{s.num_cut_short:,} cut short"] if s.num_cut_short else []
    parts += [f"{s.num_unserved:,} never came: what they follow was turned away"] if s.num_unserved else []
    return f"{s.num_requests:,}: {', '.join(parts)}"


def _latency_table(summary: SimulationSummary) -> Iterator[str]:
    rows = [
        [_LABELS.get(name, name), *(f"{getattr(found, column) / 1e6:,.2f}" for column in _COLUMNS)]
        for name, found in summary.latencies.items()
    ]
    yield from table(("latency (ms)", *_COLUMNS), rows)


def _class_table(summary: SimulationSummary) -> Iterator[str]:
    """By prompt length, without the columns that would be empty."""
    has_slo = any(found.objectives_met_ppm is not None for found in summary.classes)
    has_fluidity = any(found.fluidity_ppm is not None for found in summary.classes)
    columns = ["prompt tokens", "sequences", *(f"{_LABELS[name]} {quantile}" for name, quantile in _CLASS_COLUMNS)]
    columns += ["in SLO"] * has_slo + ["fluidity"] * has_fluidity
    rows = []
    for each in summary.classes:
        row = [each.label, f"{each.num_sequences:,}"]
        row += [_latency(each.latencies.get(name), quantile) for name, quantile in _CLASS_COLUMNS]
        row += [_percent(each.objectives_met_ppm)] * has_slo + [_percent(each.fluidity_ppm)] * has_fluidity
        rows.append(row)
    yield from table(columns, rows)


def _replicaset_table(summary: SimulationSummary) -> Iterator[str]:
    """By replicaset, without columns that would be empty."""
    has_slo = any(each.objectives_met_ppm is not None for each in summary.replicasets)
    columns = ["replicaset", "model", "replicas", "busy", "sequences", "rejected", "output tokens/s"]
    columns += [f"{_LABELS[name]} {quantile}" for name, quantile in _CLASS_COLUMNS] + ["in SLO"] * has_slo
    rows = []
    for each in summary.replicasets:
        row = [each.name, each.model, f"{each.num_replicas:,}", f"{each.busy_ppm / 1e4:.1f} %"]
        row += [f"{each.num_complete:,}", f"{each.num_rejected:,}", f"{each.output_tokens_per_second:,.1f}"]
        row += [_latency(each.latencies.get(name), quantile) for name, quantile in _CLASS_COLUMNS]
        rows.append(row + [_percent(each.objectives_met_ppm)] * has_slo)
    yield from table(columns, rows)


def _latency(found: Distribution | None, quantile: str) -> str:
    return "-" if found is None else f"{getattr(found, quantile) / 1e6:,.1f}"


def _percent(share_ppm: int | None) -> str:
    return "-" if share_ppm is None else f"{share_ppm / 1e4:.1f} %"
