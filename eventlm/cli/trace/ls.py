"""`eventlm trace ls`: the recorded runs of a folder."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import count_progress, print_report, warn
from eventlm.cli.parser import Parser
from eventlm.cli.trace_path import plugin_in_words
from eventlm.formatting import counted
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.bus.run_list import RunSummary
    from eventlm.events import Header

_COLUMNS = ["run", "model", "policy", "started (UTC)", "end", "seconds", "events", "MiB"]
_FULL_COLUMNS = ["requests", "finished"]
_NUM_LEFT = 5
_END_IN_WORDS = {"another_version": "other version", "still_being_written": "running", "no_end": "killed"}
_UNKNOWN = "-"


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "List the recorded runs of a folder, the newest last."
    parser.epilog = """\
examples:
  eventlm trace ls                   what servers have recorded
  eventlm trace ls runs --full       and how many requests each run had
  eventlm trace ls --json | jq -r '.[] | select(.end == "no_end") | .path'

end: end, killed (it stops between two lines), torn (within one), running,
     other version (of eventlm), unreadable (damaged, or no header yet)"""
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help="folder of runs, as of `--record DIR` (default: the state folder's)"
    )
    parser.add_argument("--full", action="store_true", help="read every run whole, to count requests and sequences")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each run, the newest last."""
    from eventlm.bus.run_list import list_runs
    from eventlm.config.state_folder import runs_folder

    folder = Path(arguments.folder) if arguments.folder is not None else runs_folder()
    if arguments.folder is None and not folder.exists():
        runs = []
    else:
        with count_progress("reading", "run", is_long=arguments.full) as on_run:
            runs = list_runs(folder, full=arguments.full, on_run=on_run)
    if arguments.json:
        print_report([], [_as_object(run) for run in runs])
        return 0
    if not runs:
        print(f"eventlm: no run is recorded in {folder}", file=sys.stderr)
        return 0
    columns = [*_COLUMNS, *_FULL_COLUMNS] if arguments.full else _COLUMNS
    print("\n".join(table(columns, [_row(run)[: len(columns)] for run in runs], left=range(_NUM_LEFT))))
    num_unreadable = sum(bool(run.problem) for run in runs)
    if num_unreadable:
        warn([f"{counted(num_unreadable, 'run')} cannot be read, --json says why"])
    return 0


def _row(run: RunSummary) -> list[str]:
    started = _UNKNOWN
    if run.started_ns is not None:
        started = datetime.fromtimestamp(run.started_ns // NANOSECONDS_PER_SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return [
        run.run,
        ", ".join(run.header.model_names) if run.header is not None else _UNKNOWN,
        ", ".join(policy.partition(":")[0] for policy in _policies(run.header)) if run.header is not None else _UNKNOWN,
        started,
        _END_IN_WORDS.get(run.end, run.end),
        f"{run.duration_ns / NANOSECONDS_PER_SECOND:,.1f}" if run.duration_ns is not None else _UNKNOWN,
        _count(run.num_events),
        f"{run.num_bytes / 2**20:,.1f}",
        _count(run.num_requests),
        _count(run.num_finished),
    ]


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else f"{number:,}"


def _policies(header: Header) -> list[str]:
    """The policy that each replicaset began with, and its parameters. A branch begins with its own."""
    found = []
    for each in header.sets:
        policies = [plugin for plugin in each.plugins if plugin.kind == "policy"]
        simulated = each.host.get("simulated")
        name = simulated.get("policy") if isinstance(simulated, dict) else None
        policy = next((plugin for plugin in policies if plugin.name == name), policies[0])
        found.append(plugin_in_words(policy).partition(" ")[2])
    return found


def _as_object(run: RunSummary) -> dict[str, Any]:
    """All but the header, of which it has what differs between runs."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(run)
    header = run.header
    del found["header"]
    return found | {
        "models": [name for each in header.sets for name in each.core.models] if header is not None else None,
        "policy": ", ".join(_policies(header)) if header is not None else None,
        "code_version": header.code_version if header is not None else None,
    }
