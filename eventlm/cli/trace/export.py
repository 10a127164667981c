"""`eventlm trace export`: a trace as tables."""

from __future__ import annotations

import argparse

from eventlm.cli.parser import Parser
from eventlm.cli.progress import file_progress
from eventlm.cli.trace_path import trace_file
from eventlm.formatting import counted


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.epilog = """\
examples:
  eventlm trace export --to csv -o tables            the newest run
  eventlm trace export runs/latest --to parquet -o tables
  python -c 'import pandas as p; print(p.read_csv("tables/steps.csv").mean())'

Writes requests.* (a row for each sequence; `request` is the event of its
arrival) and steps.*. Times are integer nanoseconds since the run started; what did not come
so far is empty. Parquet needs pyarrow: pip install 'eventlm[parquet]'."""
    parser.add_argument("--to", choices=["csv", "parquet"], required=True, help="the kind of files")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to write them to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Say what was written."""
    from eventlm.cli.warnings import warn
    from eventlm.replay.export import export

    path = trace_file(arguments.path)
    with file_progress("exporting", path) as on_progress:
        files, warnings = export(
            path, arguments.output, to=arguments.to, strict=arguments.strict, on_progress=on_progress
        )
    for file in files:
        print(f"{file.path}: {counted(file.num_rows, 'row')}")
    warn(warnings)
    return 0
