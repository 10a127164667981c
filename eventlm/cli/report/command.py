"""`eventlm report`: a run as a page to look at, in one file."""

from __future__ import annotations

import argparse
import contextlib
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.cli.output import count_progress, file_progress, is_long, warn
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.cli.time_window import WINDOW_HELP, add_window_flags, parse_window
from eventlm.cli.trace_path import HELP, LATEST, add_trust_flag, trace_file
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.errors import ExitCode, UsageError
from eventlm.formatting import counted, printable

if TYPE_CHECKING:
    from eventlm.look.report.build import RunReport

_OUTPUT = "report.html"
_MEBIBYTE = 1024 * 1024


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s [TRACE [TRACE_B]] [options]"
    parser.description = (
        "Make a page of a recorded run: what is wrong with it and why, latencies, a timeline of all requests,\n"
        "queue, blocks and batches over time, and the stories of the worst requests. It is one HTML file that\n"
        "needs nothing else, and no network."
    )
    parser.epilog = (
        """\
examples:
  eventlm report                             the newest run, as report.html
  eventlm report runs/latest -o monday.html --open
  eventlm report runs/latest --policy edf    and what edf would have done
  eventlm report runs/monday runs/tuesday    two runs of one workload
  eventlm report --from 14:05 --to 14:15     ten minutes of it

The run is verified on the way, at some 30,000 events a second for each core;
what was found is kept, so that the next report takes seconds. --no-verify is
faster and takes the log as it is: findings that need the engine's state and
the stories are left out.

"""
        + WINDOW_HELP
        + "\n\n"
        + exit_code_lines(
            ExitCode.OK,
            ExitCode.USAGE,
            ExitCode.DAMAGED,
            ExitCode.VERSION,
            ExitCode.DIFFERENT,
            ExitCode.INVARIANT,
            ExitCode.LIVENESS,
            ExitCode.GAP,
        )
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
    parser.add_argument("other", metavar="TRACE_B", nargs="?", help="a second run of the same workload, beside it")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default=_OUTPUT, help=f"the file to write (default: {_OUTPUT})"
    )
    parser.add_argument(
        "--policy",
        metavar="SPEC",
        action="append",
        default=[],
        help="what another policy would have done, such as `eventlm policies` lists; may be repeated",
    )
    add_window_flags(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not replay the run: faster, and knows less")
    parser.add_argument(
        "--partial", action="store_true", help="of a damaged trace show what precedes the damage, instead of exit 3"
    )
    add_trust_flag(parser)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and print what it finds first."""
    policies = [parse_plugin_spec(text) for text in dict.fromkeys(arguments.policy)]
    output = Path(arguments.output)
    if output.is_dir():
        raise UsageError(f"cannot write to {output}: it is a folder; name a file with -o")
    if not output.parent.is_dir():
        raise UsageError(f"cannot write to {output}: there is no folder {output.parent}; choose another file with -o")
    from eventlm.look.report.build import make_report
    from eventlm.replay.kept_input import check_keeps_input
    from eventlm.system.whole_file import whole_file

    path = trace_file(arguments.trace)
    other = "" if arguments.other is None else trace_file(arguments.other)
    for read in filter(None, (path, other)):
        check_keeps_input(output, read)
    window = parse_window(arguments, path)
    with file_progress("reading", path) as on_progress, contextlib.ExitStack() as bars:
        report = make_report(
            path,
            other=other,
            policies=policies,
            window=window,
            verify=not arguments.no_verify,
            partial=arguments.partial,
            trust_local_plugins=arguments.trust_local_plugins,
            on_progress=on_progress,
            on_stage=_stages(bars) if is_long(path) else None,
        )
    page = report.html.encode()
    with whole_file(output) as file:
        file.write(page)
    print(f"{output}: {_found(report)}, {len(page) / _MEBIBYTE:.1f} MiB")
    for finding in report.findings:
        print(f"  {printable(finding.title)} ({printable(finding.culprit)})")
    warn(report.warnings)
    if arguments.open and not webbrowser.open(output.resolve().as_uri()):
        warn([f"no browser could be started; open {output} yourself"])
    return 0


def _found(report: RunReport) -> str:
    if report.findings:
        return counted(len(report.findings), "finding")
    return "nothing stands out" if report.num_requests else "no request arrived"


def _stages(bars: contextlib.ExitStack) -> Callable[[str, int, int], None]:
    """A progress bar for each stage of a what-if."""
    shown: dict[str, Callable[[int, int], None] | None] = {}

    def on_stage(name: str, done: int, total: int) -> None:
        if name not in shown:
            shown[name] = bars.enter_context(count_progress(name, "event"))
        bar = shown[name]
        if bar is not None:
            bar(done, total)

    return on_stage
