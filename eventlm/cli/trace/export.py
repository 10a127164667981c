"""`eventlm trace export`: a trace as tables, for trace viewers, as spans, or as a workload."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Literal, get_args

from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window
from eventlm.cli.trace_path import add_trace_argument, trace_file
from eventlm.errors import UsageError
from eventlm.formatting import counted

if TYPE_CHECKING:
    from eventlm.types import OnProgress, TimeWindow

Format = Literal["csv", "parquet", "perfetto", "chrome", "otlp", "workload"]
FORMATS: tuple[Format, ...] = get_args(Format)


class _TimeOrFormat(argparse.Action):
    """`--to`: a time, which has digits, or the name of a format. One of each may be given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if any(character.isdigit() for character in values):
            namespace.to_time = values
        else:
            namespace.to_formats = [*namespace.to_formats, values]


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write a trace as tables of its requests and steps, as a timeline for trace viewers, as spans, or as a "
        "workload to simulate."
    )
    parser.epilog = (
        """\
examples:
  eventlm trace export -o tables                      the run as CSV
  eventlm trace export runs/latest --format parquet -o tables
  eventlm trace export --from 14:05 --to 14:06 -o tables
  eventlm trace export --to perfetto -o run.pftrace   open it in ui.perfetto.dev
  python -c 'import pandas as p; print(p.read_csv("tables/steps.csv").mean())'

formats:
  csv, parquet  tables in a folder: requests.* (a row for each sequence;
                `request` is the event of its arrival), steps.*, and where
                there are backends attempts.*
  perfetto      a file for ui.perfetto.dev: a lane for each live sequence with
                its phases and chunks, the steps and counters of each replica
                or the attempts at each backend, and arrows from chunks to
                steps and from preemptors to victims
  chrome        the same without arrows as JSON, for chrome://tracing and others
  otlp          OTLP in JSON lines: a span for each request, its phases below it
  workload      a file for `eventlm simulate`, `sweep`, `shrink` and `bisect`:
                the requests, and what befell the engine from outside

Times are integer nanoseconds since the run started; what a sequence did not
reach is empty. Parquet needs pyarrow: pip install 'eventlm[parquet]'. The name
of a format may also be given to a --to of its own, beside one with a time.

"""
        + WINDOW_HELP
    )
    parser.add_argument("--format", choices=FORMATS, metavar="NAME", help="what to write (default: csv)")
    parser.add_argument(
        "-o", "--output", metavar="PATH", required=True, help="folder to write the tables to, or the file of the others"
    )
    add_window_flags(parser, to_action=_TimeOrFormat)
    add_trace_argument(parser)
    parser.set_defaults(run=run, to_formats=[])


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print what is in them."""
    to = _format(arguments)
    path = trace_file(arguments.path)
    window = parse_window(arguments, path)
    with file_progress("exporting", path) as on_progress:
        lines, warnings = _export(to, path, arguments.output, window, arguments.strict, on_progress)
    print("\n".join(lines))
    warn(warnings)
    return 0


def _format(arguments: argparse.Namespace) -> Format:
    """The format that --format or --to names."""
    given = [("--to", name) for name in arguments.to_formats]
    if arguments.format is not None:
        given.append(("--format", arguments.format))
    for flag, name in given:
        if name not in FORMATS:
            raise UsageError(
                f"{flag} {name}: neither a format ({', '.join(FORMATS)}) nor a time, such as 14:05 or 1.5s"
            )
    if len({name for _, name in given}) > 1:
        raise UsageError(f"{' and '.join(f'{flag} {name}' for flag, name in given)}: give one format")
    found: Format = given[0][1] if given else "csv"
    return found


def _export(
    to: Format, path: str, output: str, window: TimeWindow | None, strict: bool, on_progress: OnProgress | None
) -> tuple[list[str], list[str]]:
    """Lines on what was written, and warnings."""
    if to == "otlp":
        from eventlm.replay.export.spans import export_spans

        spans = export_spans(path, output, window=window, strict=strict, on_progress=on_progress)
        return [f"{output}: {counted(spans.num_spans, 'span')}"], spans.warnings
    if to == "workload":
        from eventlm.replay.export.workload import export_workload

        written = export_workload(path, output, window=window, strict=strict, on_progress=on_progress)
        counts = f"{counted(written.num_requests, 'request')}, {counted(written.num_incidents, 'incident')}"
        return [f"{output}: {counts}"], [*written.notes, *written.warnings]
    if to == "perfetto" or to == "chrome":
        from eventlm.replay.export.timeline import export_timeline

        found = export_timeline(path, output, to=to, window=window, strict=strict, on_progress=on_progress)
        line = f"{output}: {counted(found.num_sequences, 'sequence')}, {counted(found.num_steps, 'step')}"
        return [line], found.warnings
    from eventlm.replay.export.tables import export

    files, warnings = export(path, output, to=to, window=window, strict=strict, on_progress=on_progress)
    return [f"{file.path}: {counted(file.num_rows, 'row')}" for file in files], warnings
