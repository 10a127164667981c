"""`eventlm shrink`: the smallest workload that still shows a problem."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.conditions import CONDITION_HELP, add_condition_flags, parse_budget, read_subject
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.cli.simulate.flags import WORKLOAD_HELP, add_engine_flags
from eventlm.cli.trace_path import trace_file
from eventlm.errors import ExitCode, UsageError
from eventlm.replay.kept_input import check_keeps_input
from eventlm.system.processors import usable_cores
from eventlm.table import aligned, table

if TYPE_CHECKING:
    from eventlm.replay.shrink.shrinker import ShrinkResult


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Make a workload as small as it can be while a condition holds in its simulation: fewer requests, shorter ones,
without gaps, without what they can do without. What is left is the cause, small enough to read, and with --test
a test of it: it fails while the problem is there, and passes once it is fixed.

A trace is served by the engine that it was recorded with, with a cost model fitted to it; flags of the engine
go before that. Two runs of this command, with however many processes, find the same; only a --budget in
seconds depends on the machine. Ctrl-C keeps what is found."""
    parser.usage = "%(prog)s TRACE|WORKLOAD --keep PRED -o FILE [--test FILE] [options]"
    parser.epilog = (
        """\
examples:
  eventlm shrink runs/latest --keep 'p99(ttft, prompt <= 256) > 5s' \\
    -o small.jsonl --test test_small.py
  eventlm shrink W.jsonl --cost-model h200-llama3-8b --num-blocks 900 \\
    --keep 'preemptions > 50' -o small.jsonl --engine --budget 10min

"""
        + CONDITION_HELP
        + "\n\n"
        + exit_code_lines(
            ExitCode.OK,
            ExitCode.DAMAGED,
            ExitCode.TORN,
            ExitCode.INTERRUPTED,
            meanings={
                ExitCode.FAILED: "no room for the files, or the budget is spent before anything was found",
                ExitCode.USAGE: "usage, or the condition does not hold at the start",
            },
        )
    )
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the workload file to write")
    parser.add_argument("--test", metavar="FILE", help="write a pytest file for it too")
    parser.add_argument("--engine", action="store_true", help="lower the engine's limits too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_condition_flags(parser, required=True)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shrink, write the files and print the report."""
    budget = parse_budget(arguments.budget)
    path = trace_file(arguments.workload)
    _check_output(arguments.output, "-o", path)
    if arguments.test is not None:
        _check_output(arguments.test, "--test", path)
        if os.path.realpath(arguments.test) == os.path.realpath(arguments.output):
            raise UsageError(f"--test {arguments.test}: -o names the same file; choose another")
    from eventlm.cli.output import count_progress, print_report
    from eventlm.replay.expressions.parser import parse
    from eventlm.replay.predicate.environment import check_condition
    from eventlm.replay.predicate.oracle import Oracle
    from eventlm.replay.shrink.shrinker import shrink
    from eventlm.replay.shrink.stub import write_stub
    from eventlm.replay.workload.file import save_workload

    check_condition(parse(arguments.keep))
    subject = read_subject(path, arguments)
    subject.print_notes()
    num_before = len(subject.workload.requests)
    jobs = usable_cores() if arguments.jobs is None else arguments.jobs
    with count_progress("shrinking", "simulation") as on_progress:

        def on_trial(num_trials: int) -> None:
            if on_progress is not None:
                on_progress(num_trials, budget.num_trials or 0)

        with Oracle(arguments.keep, subject.cost, num_jobs=jobs, budget=budget, on_trial=on_trial) as oracle:
            result = shrink(oracle, subject.workload, subject.options, with_limits=arguments.engine)
    save_workload(arguments.output, result.workload)
    if arguments.test is not None:
        write_stub(arguments.test, arguments.output, arguments.keep, result.options, subject.cost)
    lines = _render(arguments, result, num_before)
    as_object = _as_object(arguments, result, num_before) if arguments.json else None
    print_report(lines, as_object, warnings=subject.warnings)
    return ExitCode.INTERRUPTED if result.stopped == "interrupted" else ExitCode.OK


def _check_output(path: str, flag: str, read: str) -> None:
    """Raise UsageError before minutes of work if the file cannot be written after them, or may not be."""
    target = Path(path)
    if target.is_dir() or (target.exists() and not target.is_file()):
        raise UsageError(f"{flag} {path}: it is not a file; choose another")
    if not os.access(target.resolve().parent, os.W_OK):
        raise UsageError(f"{flag} {path}: its folder is not there, or cannot be written to; choose another")
    check_keeps_input(path, read, flag=flag)


def _render(arguments: argparse.Namespace, result: ShrinkResult, num_before: int) -> Iterator[str]:
    requests = result.workload.requests
    minimal = "no single one can go" if result.is_minimal else "fewer may do"
    lines = [
        ("kept", arguments.keep),
        ("requests", f"{num_before:,} before, {len(requests):,} now; {minimal}"),
        ("took", f"{result.num_trials:,} simulations, {result.wall_ns / 1e9:,.1f} s"),
        ("workload", arguments.output),
    ]
    lines += [("test", arguments.test)] if arguments.test is not None else []
    lines += [("stopped", result.stopped)] if result.stopped else []
    yield from aligned(lines)
    yield ""
    rows = [
        [each.name, f"{each.num_requests:,}", f"{each.prompt_tokens:,}", f"{each.num_trials:,}"]
        for each in result.passes
        if each.num_trials
    ]
    yield from table(("pass", "requests left", "prompt tokens", "simulations"), rows)


def _as_object(arguments: argparse.Namespace, result: ShrinkResult, num_before: int) -> dict[str, Any]:
    return {
        "condition": arguments.keep,
        "workload": arguments.output,
        "test": arguments.test,
        "num_before": num_before,
        "num_requests": len(result.workload.requests),
        "is_minimal": result.is_minimal,
        "stopped": result.stopped,
        "num_trials": result.num_trials,
        "wall_ns": result.wall_ns,
        "options": result.options,
        "passes": result.passes,
    }
