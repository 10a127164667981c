"""`eventlm trace stats`: the tables, the same as JSON, and pictures."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import file_progress, print_report
from eventlm.cli.parser import Parser
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window, window_in_words
from eventlm.cli.trace_path import add_trace_argument, trace_file
from eventlm.core.recorded_layouts import layouts_in_words
from eventlm.formatting import counted, tally
from eventlm.table import aligned, table
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.metrics.trace_metrics import Distribution, TraceStats

_RANK_COLUMNS = {
    "stages": ("busy, ms", "busy", "waiting, ms/step", "exchange, ms/step"),
    "KV groups": ("tokens", "share"),
}
_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")
#: The usual names, as in every other table here.
_ROW_NAMES = {
    "prefill_e2e_time": "TTFT",
    "decode_token_execution_plus_preemption_time": "TBT",
    "request_time_per_output_token": "TPOT",
}


_REPLICA_COLUMNS = (
    "replicas", "steps completed", "busy", "output tokens", "sequences", "cache hits", "preemptions", "workers lost",
)  # fmt: skip
_BACKEND_COLUMNS = ("backends", "attempts", "answers", "failures", "withdrawn", "hedges", "output tokens", "cache hits")
#: Columns of classes and replicasets, each a quantile of a metric.
_PART_TIMES = {
    "TTFT p50, ms": ("prefill_e2e_time", "p50"),
    "TTFT p99, ms": ("prefill_e2e_time", "p99"),
    "queue p99, ms": ("request_scheduling_delay", "p99"),
    "TPOT p99, ms": ("request_time_per_output_token", "p99"),
}


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Print the metrics of a trace: requests, steps, replicas, operations."
    parser.epilog = (
        """\
examples:
  eventlm trace stats runs/latest                    the tables
  eventlm trace stats runs/latest --plot plots       and pictures of them
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

Of a pipeline, a step waits for a stage while that computes another one, and exchange is the rest of its way there.

The pictures (--plot) show time of day in UTC, as the server's log does. A replica without a step in flight is drawn
with a batch of 0."""
    )
    add_window_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="DIR", help="write pictures (PNG) to this folder")
    add_trace_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables of a trace."""
    from eventlm.metrics.trace_metrics import trace_stats

    path = trace_file(arguments.path)
    window = parse_window(arguments, path)
    with file_progress("reading", path) as on_progress:
        stats = trace_stats(path, window=window, strict=arguments.strict, on_progress=on_progress)
    print_report(render(stats), _as_object(stats) if arguments.json else None, warnings=stats.warnings)
    if arguments.plot is not None:
        from eventlm.cli.trace.plots import plot

        for picture in plot(stats, arguments.plot):
            print(picture, file=sys.stderr)
    return 0


def _as_object(stats: TraceStats) -> dict[str, Any]:
    """All but the single values and the time series, of which a trace has too many."""
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
        "classes": stats.classes,
        **({"replicasets": stats.replicasets} if stats.replicasets else {}),
        "metrics": stats.snapshot,
    }


def render(stats: TraceStats) -> Iterator[str]:
    """The tables, line by line."""
    from eventlm.metrics.trace_metrics import REQUEST_METRICS, STEP_METRICS

    yield from aligned(_summary(stats))
    found = stats.distributions
    for title, names in (("requests", REQUEST_METRICS), ("steps", STEP_METRICS)):
        rows = [_distribution_row(name, found[name]) for name in names if name in found]
        if rows:
            yield ""
            yield from table([title, *_COLUMNS], rows)
    if stats.snapshot.classes:
        yield ""
        yield from _class_table(stats)
    if stats.replicasets:
        yield ""
        yield from _replicaset_table(stats)
    for columns, rows in (
        (_REPLICA_COLUMNS, _replica_rows(stats)),
        (_BACKEND_COLUMNS, _backend_rows(stats)),
        (("stages", *_RANK_COLUMNS["stages"]), _stage_rows(stats)),
        (("KV groups", *_RANK_COLUMNS["KV groups"]), _group_rows(stats)),
    ):
        if rows:
            yield ""
            yield from table([*columns], rows)
    operations = _operation_rows(stats)
    if operations:
        yield ""
        yield from table(["operations", "ms", "ms/step", "share"], operations)


def _summary(stats: TraceStats) -> Iterator[tuple[str, str]]:
    snapshot = stats.snapshot
    seconds = snapshot.duration_ns / NANOSECONDS_PER_SECOND
    tokens = sum(replica.generation_tokens for replica in snapshot.replicas)
    per_second = f", {tokens / seconds:,.1f} output tokens/s" if seconds else ""
    prompts = f"{sum(r.prompt_tokens for r in snapshot.replicas):,} prompt (of sequences past their prompt)"
    unfinished = ""
    if stats.num_unfinished:
        with_token = f"{stats.num_unfinished_with_token:,} of them past their first token"
        unfinished = f"; {stats.num_unfinished:,} unfinished, {with_token}"
    models = ", ".join(stats.header.model_names)
    yield "run", f"{stats.header.run}, {models}, {seconds:,.3f} s"
    if layouts := layouts_in_words(stats.header):
        yield "ranks", layouts
    if stats.window is not None:
        yield "window", window_in_words(stats.window, int(stats.header.unix_start_ns))
    yield "requests", f"{snapshot.num_requests:,}, {_total(stats.reject_reasons, 'rejected')}"
    yield "sequences", _total(stats.finish_reasons, "ended") + unfinished
    yield "tokens", f"{prompts}, {tokens:,} output{per_second}"
    yield "log", f"{counted(snapshot.num_events, 'event')}, {counted(stats.num_bytes, 'byte')}"
    if snapshot.num_unseen or snapshot.num_cut:
        without = f"{counted(snapshot.num_unseen, 'sequence')} without a beginning, {snapshot.num_cut:,} without an end"
        yield "not seen", f"{without} in the log: not measured"
    if snapshot.num_plugin_failures:
        yield "plug-ins", f"{counted(snapshot.num_plugin_failures, 'answer')} not used, see `plugin_failed`"


def _total(counts: dict[str, int], what: str) -> str:
    return f"{sum(counts.values()):,} {what}{': ' if counts else ''}{tally(counts)}"


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


def _times_of_part(found: dict[str, Distribution]) -> list[str]:
    """The columns of _PART_TIMES."""
    return [_milliseconds(getattr(found[key], at)) if key in found else "-" for key, at in _PART_TIMES.values()]


def _replicaset_table(stats: TraceStats) -> Iterator[str]:
    columns = ["replicasets", "model", "replicas", "sequences", "rejected", "busy", "output tokens", *_PART_TIMES]
    rows, first = [], 0
    for each in stats.header.sets:
        replicas = stats.snapshot.replicas[first : first + each.core.num_replicas]
        first += each.core.num_replicas
        # Of those that stand for backends, some are spare.
        used = [replica for replica in replicas if not each.core.forwards or replica.backend is not None]
        counts = [
            len(used),
            sum(sum(replica.finish_reasons.values()) for replica in replicas),
            sum(sum(replica.reject_reasons.values()) for replica in replicas),
        ]
        busy_ns = sum(replica.busy_ns for replica in replicas)
        busy = "-" if each.core.forwards else _share(busy_ns, stats.snapshot.duration_ns * len(replicas))
        tokens = f"{sum(replica.generation_tokens for replica in replicas):,}"
        times = _times_of_part(stats.replicasets[each.name])
        rows.append([each.name, each.core.models[0], *(f"{count:,}" for count in counts), busy, tokens, *times])
    yield from table(columns, rows, left=(0, 1))


def _class_table(stats: TraceStats) -> Iterator[str]:
    columns = ["classes", "requests", "complete", "dropped", *_PART_TIMES, "deadlines met", "SLO met"]
    rows = []
    for name, sums in stats.snapshot.classes.items():
        shown = _times_of_part(stats.classes.get(name, {}))
        met = [
            _share(sums.num_deadlines_met, sums.num_deadlines_met + sums.num_deadlines_missed),
            _share(sums.num_slo_met, sums.num_slo_met + sums.num_slo_missed),
        ]
        counts = [f"{count:,}" for count in (sums.num_requests, sums.num_complete, sums.num_dropped)]
        rows.append([name, *counts, *shown, *met])
    yield from table(columns, rows)


def _replica_rows(stats: TraceStats) -> list[list[str]]:
    """Each replica with workers."""
    forwards = [each.core.forwards for each in stats.header.sets for _ in range(each.core.num_replicas)]
    return [
        [
            str(index),
            f"{replica.num_steps:,}",
            _share(replica.busy_ns, stats.snapshot.duration_ns),
            f"{replica.generation_tokens:,}",
            f"{sum(replica.finish_reasons.values()):,}",
            _share(replica.hit_tokens, replica.queried_tokens),
            f"{sum(replica.preempt_reasons.values()):,}",
            f"{replica.num_workers_lost:,}",
        ]
        for index, replica in enumerate(stats.snapshot.replicas)
        if not forwards[index]
    ]


def _backend_rows(stats: TraceStats) -> list[list[str]]:
    """Each replica that is another server, as it was at the end."""
    return [
        [
            backend.name,
            f"{backend.num_attempts:,}",
            f"{backend.num_answers:,}",
            f"{sum(backend.failures.values()):,}",
            f"{backend.num_withdrawn:,}",
            f"{backend.num_hedges:,}",
            f"{backend.generation_tokens:,}",
            _share(backend.cached_tokens, backend.prompt_tokens),
        ]
        for replica in stats.snapshot.replicas
        if (backend := replica.backend) is not None
    ]


def _stage_rows(stats: TraceStats) -> list[list[str]]:
    """Each stage of each replica: what it was busy for, how long steps waited for it, and took to reach it."""
    return [
        [
            f"{index}: stage {stage}",
            _milliseconds(replica.stage_busy_ns[stage]),
            _share(replica.stage_busy_ns[stage], stats.snapshot.duration_ns),
            _milliseconds(replica.stage_wait_ns[stage] / max(replica.num_steps, 1)),
            _milliseconds(replica.stage_exchange_ns[stage] / max(replica.num_steps, 1)),
        ]
        for index, replica in enumerate(stats.snapshot.replicas)
        for stage in range(len(replica.stage_busy_ns))
    ]


def _group_rows(stats: TraceStats) -> list[list[str]]:
    """Each KV group of each replica, with its share of what all of them computed."""
    return [
        [f"{index}: group {group}", f"{num_tokens:,}", _share(num_tokens, sum(replica.group_tokens))]
        for index, replica in enumerate(stats.snapshot.replicas)
        for group, num_tokens in enumerate(replica.group_tokens)
    ]


def _operation_rows(stats: TraceStats) -> list[list[str]]:
    """Over all replicas, the longest first, and what no operation was measured in; shares are of the steps' time."""
    replicas = stats.snapshot.replicas
    times = sum((Counter(replica.op_ns) for replica in replicas), Counter[str]())
    # Of several ranks the one that answers, in the last stage.
    busy_ns = sum(replica.stage_busy_ns[-1] if replica.stage_busy_ns else replica.busy_ns for replica in replicas)
    num_steps = max(sum(replica.num_steps for replica in replicas), 1)
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    if times and busy_ns > times.total():
        ordered.append(("(the rest)", busy_ns - times.total()))
    return [[name, _milliseconds(ns), f"{ns / num_steps / 1e6:,.3f}", _share(ns, busy_ns)] for name, ns in ordered]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
