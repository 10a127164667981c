"""`eventlm trace diff`: two runs of one workload beside each other, in text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import file_progress, print_report
from eventlm.cli.parser import READING_A_TRACE, Parser, add_number, exit_code_lines
from eventlm.cli.trace_path import HELP, add_strict_flag, trace_file
from eventlm.errors import ExitCode
from eventlm.formatting import counted
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND

if TYPE_CHECKING:
    from eventlm.replay.diff.diff import SequenceDelta, TraceDiff, TraceSide
    from eventlm.replay.diff.first_difference import FirstDifference, SideOfDifference

_TIMES = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "e2e": "end to end, ms", "queue": "queueing, ms"}
_COUNTS = {"preemptions": "preemptions", "cached_tokens": "cached tokens", "output_tokens": "output tokens"}
_QUANTILES = ("p50", "p90", "p99")
#: Most lines of one kind that are listed; --json has all.
_MAX_LISTED = 12
_MAX_VALUE_CHARS = 48
_MAX_EVENT_CHARS = 400


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compare two runs of one workload: their set-up, the first decision that differs, all requests."
    )
    parser.epilog = """\
examples:
  eventlm trace diff runs/monday runs/tuesday
  eventlm trace diff A B --top 20 --by ttft
  eventlm trace diff A B --whole        all of the two decisions that differ
  eventlm trace diff A B --json | jq .first

Requests are paired by what they ask for and by the prompt blocks and sessions
that they share, the first of those alike with the first. #5 is the fifth that
both runs have. A delta is B's value less A's, request by request; less
and more count those of which B's value is smaller or larger.

Two live runs soon differ by time alone: a step that takes longer meets other
requests at its end. `eventlm simulate` takes that out of a comparison.

""" + exit_code_lines(
        *READING_A_TRACE,
        ExitCode.DIFFERENT,
        meanings={ExitCode.OK: "all requests and decisions alike (times may differ)"},
    )
    parser.add_argument("a", metavar="A", help=HELP.partition(" (default")[0])
    parser.add_argument("b", metavar="B", help="the other trace, likewise")
    add_number(parser, "--top", "how many of the largest changes to list (default: 10)", least=0, default=10)
    parser.add_argument(
        "--by",
        choices=[*_TIMES, *_COUNTS],
        metavar="METRIC",
        default="e2e",
        help=f"of {', '.join([*_TIMES, *_COUNTS])} (default: e2e)",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="print the first decisions that differ to their last block, not only what differs in them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every request")
    add_strict_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what differs; returns the exit code."""
    from eventlm.replay.diff.diff import diff, read_side

    sides = []
    for name in (arguments.a, arguments.b):
        path = trace_file(name)
        with file_progress("reading", path) as on_progress:
            sides.append(read_side(path, strict=arguments.strict, on_progress=on_progress))
    with file_progress("comparing", sides[0].path) as on_progress:
        found = diff(sides[0], sides[1], on_progress=on_progress)
    lines = render(found, metric=arguments.by, num_most=arguments.top, whole=arguments.whole)
    warnings = [warning for side in sides for warning in side.warnings]
    print_report(lines, _as_object(found) if arguments.json else None, warnings=warnings)
    return ExitCode.OK if found.is_same else ExitCode.DIFFERENT


def render(found: TraceDiff, *, metric: str, num_most: int, whole: bool = False) -> Iterator[str]:
    """The report, line by line; `metric` is what the largest changes are of. whole: decisions too, to their end."""
    yield from (f"{name}  {_side(side)}" for name, side in (("A", found.a), ("B", found.b)))
    if found.header:
        yield ""
        rows = [[field.name, _value(field.a), _value(field.b)] for field in found.header[:_MAX_LISTED]]
        yield from table(["set up", "A", "B"], rows, left=range(3))
        yield from _rest(len(found.header))
    yield ""
    unpaired = f"{len(found.only_a):,} only in A, {len(found.only_b):,} only in B"
    yield f"{counted(found.num_pairs, 'request')} in both, {unpaired}"
    if 2 * found.num_pairs < min(len(found.a.arrivals), len(found.b.arrivals)):
        yield "fewer than half of the requests are alike: these are hardly runs of one workload"
    for side, requests in (("A", found.only_a), ("B", found.only_b)):
        if requests:
            rest = ", ..." if len(requests) > _MAX_LISTED else ""
            yield f"only in {side}: requests {', '.join(map(str, requests[:_MAX_LISTED]))}{rest}"
    yield ""
    if found.is_identical:
        yield "the runs are the same: all decisions are alike, and so are the times of all requests"
        return
    if found.first is None:
        yield "all decisions are alike; times differ"
    else:
        yield from _first(found.first, whole=whole)
    yield from _deltas(found)
    yield from _largest(found, metric, num_most)


def _side(side: TraceSide) -> str:
    rejected = f", {side.num_rejected:,} rejected" if side.num_rejected else ""
    return (
        f"{side.path}: run {side.header.run}, {counted(side.num_events, 'event')}, "
        f"{counted(len(side.arrivals), 'request')}{rejected}"
    )


def _value(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 4] + " ..."


def _rest(number: int) -> list[str]:
    return [f"and {number - _MAX_LISTED} more, see --json"] if number > _MAX_LISTED else []


def _first(first: FirstDifference, *, whole: bool) -> Iterator[str]:
    yield f"first difference: {first.what}"
    yield from (f"  {detail}" for detail in first.details)
    for name, side in (("A", first.a), ("B", first.b)):
        yield from _decision(name, side, whole=whole)


def _decision(name: str, side: SideOfDifference, *, whole: bool) -> Iterator[str]:
    if side.decision is None or side.after_ns is None:
        yield f"  {name}: nothing"
        return
    text = json.dumps(side.decision if whole else side.excerpt, separators=(",", ":"))
    if len(text) > _MAX_EVENT_CHARS and not whole:
        text = f"{text[:_MAX_EVENT_CHARS]} ... (--whole prints all)"
    yield f"  {name}: {text}"
    if side.cause:
        yield f"     caused by {side.cause}"


def _deltas(found: TraceDiff) -> Iterator[str]:
    if not found.metrics:
        return
    rows = []
    for metric in found.metrics:
        show = _milliseconds if metric.metric in _TIMES else _count
        for index, (name, of) in enumerate((("A", metric.a), ("B", metric.b), ("B - A", metric.delta))):
            title = (_TIMES | _COUNTS)[metric.metric] if not index else ""
            cells = [show(getattr(of, quantile), is_delta=index == 2) for quantile in _QUANTILES]
            changed = [f"{metric.num_less:,}", f"{metric.num_more:,}"] if index == 2 else ["", ""]
            rows.append([title, name, f"{of.count:,}", *cells, *changed])
    yield ""
    yield from table(["sequences", "", "count", *_QUANTILES, "less", "more"], rows, left=range(2))
    if found.num_uncompared:
        yield f"{counted(found.num_uncompared, 'sequence')} did not run to the end in both and are not compared"


def _milliseconds(ns: int | None, *, is_delta: bool = False) -> str:
    if ns is None:
        return "-"
    milliseconds = round(ns / NANOSECONDS_PER_MILLISECOND, 2) or 0.0
    return f"{milliseconds:{'+' if is_delta and milliseconds else ''},.2f}"


def _count(number: int | None, *, is_delta: bool = False) -> str:
    return "-" if number is None else f"{number:{'+' if is_delta and number else ''},}"


def _largest(found: TraceDiff, metric: str, num_most: int) -> Iterator[str]:
    largest = found.largest(metric, num_most)
    if not largest:
        return
    title = (_TIMES | _COUNTS)[metric]
    columns = ["largest changes", "in A", "in B", "prompt", f"{title}: A", "B", "B - A", "TTFT", "e2e", "preempted"]
    yield ""
    yield from table(columns, [_largest_row(sequence, metric) for sequence in largest])


def _largest_row(sequence: SequenceDelta, metric: str) -> list[str]:
    from eventlm.replay.diff.diff import METRICS

    show = _milliseconds if metric in _TIMES else _count
    return [
        f"#{sequence.pair}.{sequence.index}" if sequence.index else f"#{sequence.pair}",
        f"{sequence.a.request}",
        f"{sequence.b.request}",
        f"{sequence.a.prompt_tokens:,}",
        show(getattr(sequence.a, METRICS[metric])),
        show(getattr(sequence.b, METRICS[metric])),
        show(sequence.delta(metric), is_delta=True),
        _milliseconds(sequence.delta("ttft"), is_delta=True),
        _milliseconds(sequence.delta("e2e"), is_delta=True),
        _count(sequence.delta("preemptions"), is_delta=True),
    ]


def _as_object(found: TraceDiff) -> dict[str, Any]:
    """All that was found, and which runs they are."""
    from eventlm.replay.diff.diff import METRICS

    sides = {
        name: {"path": side.path, "run": side.header.run, "num_requests": len(side.arrivals), "warnings": side.warnings}
        for name, side in (("a", found.a), ("b", found.b))
    }
    sequences = [
        {
            "pair": sequence.pair,
            "index": sequence.index,
            "a": sequence.a,
            "b": sequence.b,
            "delta": {METRICS[name]: sequence.delta(name) for name in METRICS},
        }
        for sequence in found.sequences
    ]
    return sides | {
        "same": found.is_same,
        "header": found.header,
        "num_pairs": found.num_pairs,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "first": found.first,
        "num_uncompared": found.num_uncompared,
        "metrics": found.metrics,
        "sequences": sequences,
    }
