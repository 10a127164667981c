"""`eventlm branch`: what would have become of the rest of a run, from a point of it on."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from eventlm.cli.output import file_progress, is_long, print_report
from eventlm.cli.parser import READING_A_TRACE, Parser, add_number, exit_code_lines
from eventlm.cli.replay.command import parse_settings
from eventlm.cli.replay.replicasets import (
    CHANGES,
    COST_MODEL,
    PLUGIN_KINDS,
    add_replicaset_flag,
    changes_of,
    once,
    parse_replicasets,
    read_cost_models,
)
from eventlm.cli.replay.what_if import StageProgress
from eventlm.cli.time_window import nanoseconds
from eventlm.cli.trace_path import HELP, LATEST, add_strict_flag, add_trust_flag, trace_file
from eventlm.config.objectives import parse_objectives
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from eventlm.replay.branch.point import BranchPlace


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Continue a recorded run from a point of it under another policy, batcher, router or limit, and run what\n"
        "remained to be done there: the requests under way and those that arrived later. A table compares it\n"
        "with what was recorded, with error bars, and names the requests that won and lost most. With -o the branch\n"
        "is written as a trace that begins at the point."
    )
    parser.epilog = """\
examples:
  eventlm branch --at 1042 --policy edf   after the drain of event 1042
  eventlm branch --at 12.5s --policy edf  from the first drain from 12.5 s on
  eventlm branch --at 90s --set max_num_seqs=64 -o branches
  eventlm replay branches/latest          a branch is verified like any trace

Facts that are applied as one are a drain; there is no state inside it. The
size of the cache and what the recorded facts depend on cannot change at a
point: `eventlm replay` asks about those for the whole run.

""" + exit_code_lines(
        *READING_A_TRACE, ExitCode.FAILED, ExitCode.DIFFERENT, ExitCode.INVARIANT, ExitCode.LIVENESS, ExitCode.GAP
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
    parser.add_argument(
        "--at",
        metavar="POS",
        required=True,
        help="an event, by its number (s), or a time since the start of the run, such as 12.5s or 2min",
    )
    for kind in PLUGIN_KINDS:
        parser.add_argument(
            f"--{kind}", metavar="SPEC", help=f"another {kind} from there on, such as `eventlm policies` lists"
        )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="another value of the core's configuration from there on, such as max_num_batched_tokens=512; may be "
        "repeated",
    )
    add_replicaset_flag(parser, may="cost_model, and ")
    parser.add_argument("--slo", metavar="LIMITS", help="ttft=MS,tpot=MS,e2e=MS for requests that bring no limits")
    parser.add_argument(
        "--cost-model",
        metavar="FILE",
        help="times of steps from a TOML file, a built-in model (`eventlm simulate --help` lists them), or fitted to "
        "another trace (default: fitted to this one)",
    )
    add_number(
        parser,
        "--draws",
        "run each engine N times, with other draws of what the run does not show: 1 to 5 (default: 5); with 1 it takes "
        "a fifth of the time, and the error bars lack the spread",
        least=1,
    )
    parser.add_argument("-o", "--output", metavar="DIR", help="write the branch as a trace to this folder")
    add_trust_flag(parser)
    add_strict_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    place = parse_place(arguments.at)
    specs = {kind: getattr(arguments, kind) for kind in PLUGIN_KINDS}
    plugins = {kind: parse_plugin_spec(text) for kind, text in specs.items() if text is not None}
    settings = parse_settings(arguments.assignments)
    of_sets = parse_replicasets(arguments.replicasets)
    own = changes_of(once(of_sets, "a branch", allowed=[CHANGES, COST_MODEL]))
    objectives = parse_objectives(arguments.slo) if arguments.slo is not None else None
    from eventlm.replay.branch.branch import branch
    from eventlm.replay.branch.point import find_point
    from eventlm.replay.branch.report import render, to_object
    from eventlm.replay.rebuild import Changes
    from eventlm.replay.what_if.costs import NUM_DRAWS

    num_draws = NUM_DRAWS if arguments.draws is None else arguments.draws
    if num_draws > NUM_DRAWS:
        raise UsageError(f"--draws {num_draws}: 1 to {NUM_DRAWS} are possible")
    changes = Changes(settings=settings, of_sets=own, trust_local_plugins=arguments.trust_local_plugins, **plugins)
    path = trace_file(arguments.trace)
    with file_progress("going there", path) as on_progress:
        point = find_point(
            path,
            place,
            strict=arguments.strict,
            trust_local_plugins=arguments.trust_local_plugins,
            on_progress=on_progress,
        )
    with contextlib.ExitStack() as bars:
        result = branch(
            path,
            point,
            changes,
            objectives=objectives,
            cost_models=read_cost_models(path, arguments.cost_model, of_sets),
            num_draws=num_draws,
            output=arguments.output,
            strict=arguments.strict,
            on_progress=StageProgress(bars) if is_long(path) else None,
        )
    as_json = to_object(result) if arguments.json else None
    print_report([] if arguments.json else [render(result)], as_json, warnings=result.what_if.warnings)
    return 0


def parse_place(text: str) -> BranchPlace:
    """`1042` or `12.5s`. Raises UsageError for anything else."""
    from eventlm.replay.branch.point import BranchPlace

    if text.isascii() and text.isdigit():
        return BranchPlace(event=int(text))
    try:
        return BranchPlace(time_ns=nanoseconds(text, flag="--at"))
    except UsageError:
        raise UsageError(
            f"--at {text}: neither an event nor a time; give the number of an event, such as 1042, or a time since the "
            "start of the run, such as 12.5s"
        ) from None
