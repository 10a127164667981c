"""`eventlm trace export`: a trace as tables."""

from __future__ import annotations

import argparse

from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window
from eventlm.cli.trace_path import add_trace_argument, trace_file
from eventlm.formatting import counted


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Write the requests and the steps of a trace as two tables, for notebooks and databases."
    parser.epilog = (
        """\
examples:
  eventlm trace export -o tables                      the run as CSV
  eventlm trace export runs/latest --format parquet -o tables
  eventlm trace export --from 14:05 --to 14:06 -o tables
  python -c 'import pandas as p; print(p.read_csv("tables/steps.csv").mean())'

Writes requests.* (a row for each sequence; `request` is the event of its
arrival) and steps.*. Times are integer nanoseconds since the run started; what
a sequence did not reach is empty. Parquet needs pyarrow:
pip install 'eventlm[parquet]'.

"""
        + WINDOW_HELP
    )
    parser.add_argument("--format", choices=["csv", "parquet"], default="csv", help="the kind of files (default: csv)")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to write them to")
    add_window_flags(parser)
    add_trace_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the tables and print their paths."""
    from eventlm.replay.export.tables import export

    path = trace_file(arguments.path)
    window = parse_window(arguments, path)
    with file_progress("exporting", path) as on_progress:
        files, warnings = export(
            path,
            arguments.output,
            to=arguments.format,
            window=window,
            strict=arguments.strict,
            on_progress=on_progress,
        )
    for file in files:
        print(f"{file.path}: {counted(file.num_rows, 'row')}")
    warn(warnings)
    return 0
