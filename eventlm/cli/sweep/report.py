"""A sweep as a table, as JSON, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.table import table

if TYPE_CHECKING:
    from eventlm.replay.simulate.summary import SimulationSummary
    from eventlm.replay.sweep.sweep import ConfigurationResult, SweepResult

_METRICS = ("ttft", "tpot", "e2e")
_QUANTILES = ("p50", "p90", "p99")
_CSV_BEGINS = (
    "policy", "batcher", "router", "replicas", "tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size",
    "load", "arriving_per_s", "in_slo", "error", "num_requests", "num_complete", "num_rejected",
)  # fmt: skip
_CSV_ENDS = ("output_tokens_per_s", "num_preemptions", "hit_share", "busy_share")


def render(result: SweepResult) -> Iterator[str]:
    """The lines of the report: each configuration's loads, then the capacities."""
    again = result.num_cells - result.num_run
    yield f"{counted(result.num_cells, 'simulation')}" + (f", {again:,} of them from an earlier sweep" if again else "")
    yield ""
    columns = ("configuration", "load", "arriving/s", "complete", "rejected", *_latency_columns(), "busy", "preempted")
    has_slo = bool(result.plan.limits)
    rows = []
    for each in result.configurations:
        for load_ppm in sorted({*each.summaries, *each.errors}):
            verdict = ["yes" if each.kept.get(load_ppm) else "no"] * has_slo
            summary = each.summaries.get(load_ppm)
            name = [each.name, f"{load_ppm / 1e6:g}", f"{result.requests_per_second * load_ppm / 1e6:.2f}"]
            figures = ["failed", *[""] * (len(columns) - 4)] if summary is None else _figures(summary)
            rows.append([*name, *figures, *verdict])
    yield from table([*columns, *["in SLO"] * has_slo], rows)
    if has_slo:
        yield ""
        yield from _capacity_table(result)


def _latency_columns() -> list[str]:
    return [f"{metric.upper()} {quantile}" for metric in ("ttft", "tpot") for quantile in ("p50", "p99")]


def _figures(summary: SimulationSummary) -> list[str]:
    values = []
    for metric in ("ttft", "tpot"):
        found = summary.latencies.get(metric)
        values += ["-" if found is None else f"{getattr(found, q) / 1e6:,.1f}" for q in ("p50", "p99")]
    return [
        f"{summary.num_complete:,}",
        f"{summary.num_rejected:,}",
        *values,
        f"{summary.busy_ppm / 1e4:.0f} %",
        f"{summary.num_preemptions:,}",
    ]


def _capacity_table(result: SweepResult) -> Iterator[str]:
    limits = ", ".join(f"{each.quantile} {each.metric.upper()} <= {each.limit_ms:g} ms" for each in result.plan.limits)
    rows = [(each.name, *_capacity(each, result)) for each in result.configurations]
    yield from table((f"capacity at {limits}", "load", "requests/s"), rows)


def _capacity(each: ConfigurationResult, result: SweepResult) -> tuple[str, str]:
    """The load and the rate in words."""
    found = each.capacity
    if found is None or (found.load_ppm is None and found.first_miss_ppm is None):
        return "-", "-"
    bound, load_ppm = "", found.load_ppm
    if load_ppm is None:
        bound, load_ppm = "below ", found.first_miss_ppm or 0
    elif found.first_miss_ppm is None:
        bound = "at least "
    return f"{bound}{load_ppm / 1e6:g}", f"{bound}{result.requests_per_second * load_ppm / 1e6:.2f}"


def as_object(result: SweepResult) -> dict[str, Any]:
    """All of it but the cost model's ratios and the workload. Times in ns, loads and shares in parts per million."""
    return {
        "workload": result.plan.workload_path,
        "requests_per_second": result.requests_per_second,
        "slo": {limit.name: limit.limit_ms for limit in result.plan.limits},
        "options": result.plan.options,
        "num_cells": result.num_cells,
        "num_run": result.num_run,
        "configurations": [
            {
                "name": each.name,
                **each.configuration.options,
                "capacity": None if each.capacity is None else each.capacity._asdict(),
                "loads": [
                    {"load_ppm": load_ppm, "in_slo": each.kept.get(load_ppm), "summary": summary}
                    for load_ppm, summary in each.summaries.items()
                ],
                "errors": [{"load_ppm": load_ppm, "error": error} for load_ppm, error in each.errors.items()],
            }
            for each in result.configurations
        ],
    }


def write_files(result: SweepResult, folder: str) -> list[Path]:
    """Write the CSV, the JSON and the picture; their paths. Raises UsageError if they cannot be written."""
    import msgspec

    from eventlm.cli.sweep.plot import plot_sweep

    target = Path(folder)
    paths = [target / "sweep.csv", target / "sweep.json", target / "sweep.png"]
    try:
        paths[0].write_text(_csv(result))
        paths[1].write_bytes(msgspec.json.format(msgspec.json.encode(as_object(result))) + b"\n")
        plot_sweep(result, paths[2])
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be written: {error.strerror}") from error
    return paths


def _csv(result: SweepResult) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    latencies = [(metric, quantile) for metric in _METRICS for quantile in _QUANTILES]
    writer.writerow([*_CSV_BEGINS, *(f"{quantile}_{metric}_ms" for metric, quantile in latencies), *_CSV_ENDS])
    for each in result.configurations:
        engine = each.configuration
        name = [*(format_plugin_spec(spec) for spec in (engine.policy, engine.batcher, engine.router))]
        for load_ppm in sorted({*each.summaries, *each.errors}):
            load = [f"{load_ppm / 1e6:g}", f"{result.requests_per_second * load_ppm / 1e6:.6g}"]
            kept = each.kept.get(load_ppm)
            ranks = [engine.layout.tensor, engine.layout.stages, engine.layout.groups]
            row: list[Any] = [*name, engine.num_replicas, *ranks, *load, "" if kept is None else int(kept)]
            summary = each.summaries.get(load_ppm)
            if summary is None:
                writer.writerow([*row, each.errors[load_ppm]])
                continue
            values = [
                getattr(summary.latencies[metric], quantile) / 1e6 if metric in summary.latencies else ""
                for metric, quantile in latencies
            ]
            hits = "" if summary.hit_ppm is None else summary.hit_ppm / 1e6
            row += ["", summary.num_requests, summary.num_complete, summary.num_rejected, *values]
            row += [f"{summary.output_tokens_per_second:.6g}", summary.num_preemptions, hits, summary.busy_ppm / 1e6]
            writer.writerow(row)
    return file.getvalue()
