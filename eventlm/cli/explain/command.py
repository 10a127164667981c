"""`eventlm explain`: where the time of a request went, or of the slowest ones."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import file_progress, print_report
from eventlm.cli.parser import READING_A_TRACE, Parser, add_number, exit_code_lines
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window
from eventlm.cli.trace_path import HELP, LATEST, add_strict_flag, add_trust_flag, trace_file
from eventlm.errors import ExitCode, UsageError
from eventlm.formatting import counted
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND, TimeWindow

if TYPE_CHECKING:
    from eventlm.metrics.rows import RequestRow
    from eventlm.replay.explain.explainer import Explained
    from eventlm.replay.explain.rank import Measure, Ranking
    from eventlm.replay.explain.result import Explanation

MEASURES: tuple[Measure, ...] = ("e2e", "ttft", "queue", "tpot")
#: Of more sequences a picture would be too long to look at, or for memory.
MOST_BARS = 200
#: The measures of the ranking, and the names of their columns.
_COLUMNS: dict[Measure, str] = {"e2e": "e2e, ms", "ttft": "TTFT, ms", "queue": "queue, ms", "tpot": "TPOT, ms"}
_NUMBER = re.compile(r"(\d{1,16})(?:\.(\d{1,9}))?")
_WIDTH = 100


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [TRACE] REQUEST [options]\n       %(prog)s [TRACE] --slowest N [options]"
    parser.description = (
        "Show where each millisecond of a request went: what it waited for, which requests went first, its prompt's "
        "steps, its decoding, which request preempted it. The core that served it runs again and is queried at every "
        "event of the log; each interval has one cause, and they add up to the request's time."
    )
    parser.epilog = (
        """\
examples:
  eventlm explain --slowest 10             the slowest of the newest run
  eventlm explain 1043                     a request, by its number there
  eventlm explain runs/latest 1043.1       the second of its samples
  eventlm explain --slowest 20 --by ttft --plot slow.png
  eventlm explain --slowest 10 --from 14:05 --to 14:06
  eventlm explain 1043 --json | jq '.explanations[0].parts'

A trace does not hold the ids that clients see: the server's log line of a
request has its number as `seq`, beside the id of the x-request-id header.
The server itself takes them: GET /v1/requests/ID/explain shows the same.
Times count from the reception of the request and are the engine's.

prefill_ms of a reply's `eventlm.timings`, like `trace stats`, runs from the
launch of the first step with the request until the first token is shown, all
in between counted. `prompt` here begins when a replica takes the request in,
which may be before that launch, leaves out time after a preemption
(`preempted`, `recomputing`), and ends when the worker has computed the last
chunk if it goes on with the next step.

"""
        + WINDOW_HELP
        + """

The core goes through the file in which the request arrived from its start, at
some 10 MB of trace a second; files are as long as --record-segment says.

"""
        + exit_code_lines(*READING_A_TRACE, ExitCode.DIFFERENT, ExitCode.INVARIANT, ExitCode.LIVENESS, ExitCode.GAP)
    )
    parser.add_argument(
        "words",
        metavar="[TRACE] REQUEST",
        nargs="*",
        help=f"{HELP}; and the number of the request's `arrive` event, or NUMBER.INDEX for one of several samples",
    )
    text = "rank the slowest N sequences; those that have not ended by their time so far, marked with >"
    add_number(parser, "--slowest", text, least=1)
    parser.add_argument(
        "--by",
        choices=MEASURES,
        help="rank by end-to-end time (e2e, the default), time to the first token, time in the queue before the first "
        "step, or time per output token",
    )
    add_window_flags(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="draw a bar for each, coloured by cause")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all intervals in nanoseconds")
    add_trust_flag(parser)
    add_strict_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanations, or the ranking."""
    trace, request = _question(arguments)
    if arguments.plot is not None and Path(arguments.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {arguments.plot}: a picture is a .png, .svg or .pdf file")
    if arguments.plot is not None and (arguments.slowest or 0) > MOST_BARS:
        raise UsageError(f"--plot draws at most {MOST_BARS} sequences: give a smaller --slowest")
    from eventlm.replay.explain.explainer import explain
    from eventlm.replay.explain.rank import rank

    path = trace_file(trace)
    window = parse_window(arguments, path)
    ranking = None
    if request is None:
        with file_progress("reading", path) as on_progress:
            by: Measure = arguments.by or MEASURES[0]
            ranking = rank(
                path, arguments.slowest, by=by, window=window, strict=arguments.strict, on_progress=on_progress
            )
    wanted = [request] if ranking is None else [(row.request, row.index) for row in ranking.rows]
    with file_progress("explaining", path) as on_progress:
        explained = explain(
            path,
            [each for each in wanted if each is not None],
            trust_local_plugins=arguments.trust_local_plugins,
            strict=arguments.strict,
            on_progress=on_progress,
        )
    if ranking is not None:
        # The ranking has read the trace to its end.
        explained.warnings.extend(warning for warning in ranking.warnings if warning not in explained.warnings)
    lines = _stories(explained) if ranking is None else _ranks(explained, ranking, window)
    print_report(lines, _as_object(explained, ranking) if arguments.json else None, warnings=explained.warnings)
    if arguments.plot is not None:
        from eventlm.cli.explain.plot import plot

        plot(explained.explanations, arguments.plot)
    return 0


def _question(arguments: argparse.Namespace) -> tuple[str, tuple[int, int | None] | None]:
    """The trace, and the request (with index None: all its samples) if one is asked for."""
    words: list[str] = arguments.words
    if arguments.slowest is not None:
        if len(words) > 1 or (words and _NUMBER.fullmatch(words[0]) and not Path(words[0]).exists()):
            raise UsageError("--slowest takes no REQUEST: `eventlm explain [TRACE] --slowest N`")
        return (words[0] if words else LATEST), None
    for flag, value in (("--by", arguments.by), ("--from", arguments.from_time), ("--to", arguments.to_time)):
        if value is not None:
            raise UsageError(f"{flag} needs --slowest N")
    if not words or len(words) > 2:
        raise UsageError("name one request, `eventlm explain [TRACE] REQUEST`, or rank some with --slowest 10")
    trace = words[0] if len(words) == 2 else LATEST
    number = _NUMBER.fullmatch(words[-1])
    if number is not None:
        return trace, (int(number[1]), None if number[2] is None else int(number[2]))
    if len(words) == 1 and (words[0] == LATEST or Path(words[0]).exists()):
        raise UsageError(f"name a request of {words[0]} too, or rank some: `eventlm explain {words[0]} --slowest 10`")
    if len(words) == 2 and _NUMBER.fullmatch(words[0]):
        raise UsageError(f"the trace goes first: `eventlm explain {words[1]} {words[0]}`")
    raise UsageError(
        f"{words[-1]!r} is not the number of a request. A trace does not hold the ids that clients see: a request is "
        "known by the number of its `arrive` event, which the server's log has as `seq` beside the id; "
        f"`eventlm explain {' '.join([*words[:-1], '--slowest 10'])}` lists some"
    )


def _stories(explained: Explained) -> Iterator[str]:
    from eventlm.replay.explain.story import describe, part_rows

    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
    for index, explanation in enumerate(explained.explanations):
        if index:
            yield ""
        for paragraph in describe(explanation):
            yield textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
        yield ""
        yield from table(["part", "ms", "share"], list(part_rows(explanation)))


def _ranks(explained: Explained, ranking: Ranking, window: TimeWindow | None) -> Iterator[str]:
    if not ranking.num_ended and not ranking.num_live:
        where = explained.path if window is None else f"the window; {explained.path} may have others"
        yield f"no request arrived in {where}; `eventlm trace ls` lists other runs"
        return
    left = f", {counted(ranking.num_live, 'sequence')} of the trace unfinished" if ranking.num_live else ""
    if not ranking.rows:
        yield f"no sequence has a value of {ranking.by}{left}"
        return
    largest = "largest part" + ("" if ranking.by == "e2e" else f" of {ranking.by}")
    has_models = len({*ranking.models}) > 1
    columns = ["request", *["model"] * has_models, *_COLUMNS.values(), "prompt", "output", "end", largest]
    rows = []
    for row, each in zip(ranking.rows, explained.explanations, strict=True):
        times = [_milliseconds(row, measure) for measure in _COLUMNS]
        tokens = [f"{row.prompt_tokens:,}", f"{row.output_tokens:,}"]
        names = [each.name, *[ranking.models[row.replica]] * has_models]
        rows.append([*names, *times, *tokens, row.reason, _largest(row, each, ranking.by)])
    yield from table(columns, rows, left=(*range(1 + has_models), len(columns) - 2, len(columns) - 1))
    yield f"the slowest {len(ranking.rows):,} of {counted(ranking.num_ranked, 'sequence')} by {ranking.by}{left}"


def _milliseconds(row: RequestRow, measure: Measure) -> str:
    """`>` marks a time that was still running where the log ends."""
    from eventlm.replay.explain.rank import FIELDS, measured_ns

    ns = measured_ns(row, measure)
    if ns is None:
        return "-"
    is_running = measure in ("e2e", "tpot") or getattr(row, FIELDS[measure]) is None
    return f"{'>' if row.reason == 'unfinished' and is_running else ''}{ns / NANOSECONDS_PER_MILLISECOND:,.1f}"


def _largest(row: RequestRow, explanation: Explanation, by: str) -> str:
    """The part that took the largest share of the ranked time."""
    from eventlm.replay.explain.story import largest_part

    from_ns = {"queue": explanation.arrived_ns, "tpot": explanation.first_token_ns}.get(by)
    until_ns = explanation.first_token_ns if by == "ttft" else None
    if by == "queue" and row.request_scheduling_delay is not None:
        until_ns = explanation.arrived_ns + row.request_scheduling_delay
    return largest_part(explanation, from_ns=from_ns, until_ns=until_ns)


def _as_object(explained: Explained, ranking: Ranking | None) -> dict[str, Any]:
    from eventlm.replay.explain.story import to_object

    found: dict[str, Any] = {"path": explained.path, "warnings": explained.warnings}
    if ranking is not None:
        found |= {"by": ranking.by, "num_ranked": ranking.num_ranked, "num_live": ranking.num_live}
        found["rows"] = ranking.rows
    return found | {"explanations": [to_object(explanation) for explanation in explained.explanations]}
