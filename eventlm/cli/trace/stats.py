"""`eventlm trace stats`: the tables, the same as JSON, and pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eventlm.cli.parser import Parser
from eventlm.cli.progress import file_progress
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window, window_in_words
from eventlm.cli.trace_path import trace_file
from eventlm.formatting import counted
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.metrics.trace_metrics import Distribution, TraceStats

_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")
#: The names that the field has for them, and every other table here.
_ROW_NAMES = {
    "prefill_e2e_time": "TTFT",
    "decode_token_execution_plus_preemption_time": "TBT",
    "request_time_per_output_token": "TPOT",
}


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.epilog = (
        """\
examples:
  eventlm trace stats runs/latest                    the tables
  eventlm trace stats runs/latest --plot DIR         and pictures of them
  eventlm trace stats --from 14:05 --to 14:06        what happened at 14:05
  eventlm trace stats runs/latest --json | jq .distributions.prefill_e2e_time

Times are the engine's, in milliseconds, from the reception of a request, over the sequences that ran to their end.
TTFT (time to first token) also counts sequences that were cut short or are unfinished, if they had a first token. TBT
is the time between two tokens of a sequence, TPOT its mean over one sequence. --json has nanoseconds, and calls TTFT
`prefill_e2e_time`, TBT `decode_token_execution_plus_preemption_time` and TPOT `request_time_per_output_token`.

Tokens and steps count here once they are done: prompt tokens of each sequence (a request has `n`) whose prompt is
computed or cached, and completed steps. `eventlm trace info` counts what arrived and was launched: the prompt of each
request once, and launched steps.

"""
        + WINDOW_HELP
        + """

The pictures (--plot) show time of day in UTC, as the server's log does. A replica without a step in flight is drawn
with a batch of 0."""
    )
    add_window_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="DIR", help="write pictures (PNG) to this folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables of a trace."""
    from eventlm.cli.warnings import warn
    from eventlm.metrics.trace_metrics import trace_stats

    path = trace_file(arguments.path)
    window = parse_window(arguments, path)
    with file_progress("reading", path) as on_progress:
        stats = trace_stats(path, window=window, strict=arguments.strict, on_progress=on_progress)
    if arguments.json:
        import msgspec

        print(msgspec.json.encode(_as_object(stats)).decode())
    else:
        print("\n".join(render(stats)))
    warn(stats.warnings)
    if arguments.plot is not None:
        from eventlm.cli.trace.plots import plot

        for picture in plot(stats, arguments.plot):
            print(picture, file=sys.stderr)
    return 0


def _as_object(stats: TraceStats) -> dict[str, Any]:
    """All but the single values and the course of time, of which a trace has too many."""
    return {
        "path": stats.path,
        "run": stats.header.run,
        "window": None if stats.window is None else stats.window._asdict(),
        "num_bytes": stats.num_bytes,
        "warnings": stats.warnings,
        "finish_reasons": stats.finish_reasons,
        "reject_reasons": stats.reject_reasons,
        "num_unfinished": stats.num_unfinished,
        "num_unfinished_with_token": stats.num_unfinished_with_token,
        "distributions": stats.distributions,
        "classes": {name: found.distributions for name, found in stats.classes.items()},
        "metrics": stats.snapshot,
    }


def render(stats: TraceStats) -> Iterator[str]:
    """The tables, line by line."""
    from eventlm.metrics.trace_metrics import REQUEST_METRICS, STEP_METRICS

    yield from _summary(stats)
    found = stats.distributions
    for title, names in (("requests", REQUEST_METRICS), ("steps", STEP_METRICS)):
        rows = [_distribution_row(name, found[name]) for name in names if name in found]
        if rows:
            yield ""
            yield from table([title, *_COLUMNS], rows)
    yield ""
    if stats.snapshot.classes:
        yield from _class_table(stats)
        yield ""
    yield from _replica_table(stats)
    operations = _operation_rows(stats)
    if operations:
        yield ""
        yield from table(["operations", "ms", "ms/step", "share"], operations)


def _summary(stats: TraceStats) -> Iterator[str]:
    snapshot = stats.snapshot
    seconds = snapshot.duration_ns / NANOSECONDS_PER_SECOND
    ended = sum(stats.finish_reasons.values())
    tokens = sum(replica.generation_tokens for replica in snapshot.replicas)
    per_second = f", {tokens / seconds:,.1f} output tokens/s" if seconds else ""
    prompts = f"{sum(r.prompt_tokens for r in snapshot.replicas):,} prompt (of sequences past their prompt)"
    rows = [
        ("run", f"{stats.header.run}, {snapshot.model}, {seconds:,.3f} s"),
        ("requests", f"{snapshot.num_requests:,}, {_rejected(stats)}"),
        ("sequences", f"{ended:,} ended{_reasons(stats.finish_reasons)}{_unfinished(stats)}"),
        ("tokens", f"{prompts}, {tokens:,} output{per_second}"),
        ("log", f"{counted(snapshot.num_events, 'event')}, {counted(stats.num_bytes, 'byte')}"),
    ]
    if stats.window is not None:
        rows.insert(1, ("window", window_in_words(stats.window, int(stats.header.unix_start_ns))))
    if snapshot.num_unseen or snapshot.num_cut:
        rows.append(
            (
                "not seen",
                f"{counted(snapshot.num_unseen, 'sequence')} without a beginning, {snapshot.num_cut:,} without an end "
                "in the log: not measured",
            )
        )
    if snapshot.num_plugin_failures:
        rows.append(("plug-ins", f"{counted(snapshot.num_plugin_failures, 'answer')} not used, see `plugin_failed`"))
    for name, value in rows:
        yield f"{name:<10}  {value}"


def _rejected(stats: TraceStats) -> str:
    return f"{sum(stats.reject_reasons.values()):,} rejected{_reasons(stats.reject_reasons)}"


def _unfinished(stats: TraceStats) -> str:
    if not stats.num_unfinished:
        return ""
    return f"; {stats.num_unfinished:,} unfinished, {stats.num_unfinished_with_token:,} of them past their first token"


def _reasons(counts: dict[str, int]) -> str:
    return ": " + ", ".join(f"{count:,} {name}" for name, count in counts.items()) if counts else ""


def _distribution_row(name: str, found: Distribution) -> list[str]:
    from eventlm.metrics.trace_metrics import COUNTS

    values: list[float] = [found.mean, found.p50, found.p90, found.p95, found.p99, found.max]
    if name in COUNTS:
        shown = [f"{found.mean:,.1f}", *(f"{value:,}" for value in values[1:])]
    else:
        shown = [_milliseconds(value) for value in values]
    unit = "" if name in COUNTS else ", ms"
    return [_ROW_NAMES.get(name, name) + unit, f"{found.count:,}", *shown]


def _milliseconds(ns: float) -> str:
    return f"{ns / NANOSECONDS_PER_MILLISECOND:,.2f}"


def _class_table(stats: TraceStats) -> Iterator[str]:
    columns = ["classes", "requests", "complete", "dropped", "TTFT p50, ms", "TTFT p99, ms", "queue p99, ms"]
    columns += ["TPOT p99, ms", "deadlines met", "SLO met"]
    rows = []
    for name, sums in stats.snapshot.classes.items():
        found = stats.classes[name].distributions if name in stats.classes else {}
        times = [("prefill_e2e_time", "p50"), ("prefill_e2e_time", "p99"), ("request_scheduling_delay", "p99")]
        times += [("request_time_per_output_token", "p99")]
        shown = [_milliseconds(getattr(found[key], at)) if key in found else "-" for key, at in times]
        met = [
            _share(sums.num_deadlines_met, sums.num_deadlines_met + sums.num_deadlines_missed),
            _share(sums.num_slo_met, sums.num_slo_met + sums.num_slo_missed),
        ]
        counts = [f"{count:,}" for count in (sums.num_requests, sums.num_complete, sums.num_dropped)]
        rows.append([name, *counts, *shown, *met])
    yield from table(columns, rows)


def _replica_table(stats: TraceStats) -> Iterator[str]:
    columns = [
        "replicas",
        "steps completed",
        "busy",
        "output tokens",
        "sequences",
        "cache hits",
        "preemptions",
        "workers lost",
    ]
    duration_ns = stats.snapshot.duration_ns
    rows = []
    for index, replica in enumerate(stats.snapshot.replicas):
        rows.append(
            [
                str(index),
                f"{replica.num_steps:,}",
                _share(replica.busy_ns, duration_ns),
                f"{replica.generation_tokens:,}",
                f"{sum(replica.finish_reasons.values()):,}",
                _share(replica.hit_tokens, replica.queried_tokens),
                f"{sum(replica.preempt_reasons.values()):,}",
                f"{replica.num_workers_lost:,}",
            ]
        )
    yield from table(columns, rows)


def _operation_rows(stats: TraceStats) -> list[list[str]]:
    """Over all replicas, the longest first, and what no operation was measured in; shares are of the steps' time."""
    times: dict[str, int] = {}
    for replica in stats.snapshot.replicas:
        for name, ns in replica.op_ns.items():
            times[name] = times.get(name, 0) + ns
    busy_ns = sum(replica.busy_ns for replica in stats.snapshot.replicas)
    num_steps = max(sum(replica.num_steps for replica in stats.snapshot.replicas), 1)
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    if times and busy_ns > sum(times.values()):
        ordered.append(("(the rest)", busy_ns - sum(times.values())))
    return [[name, _milliseconds(ns), f"{ns / num_steps / 1e6:,.3f}", _share(ns, busy_ns)] for name, ns in ordered]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
