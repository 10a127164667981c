"""`eventlm bisect`: where something begins."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eventlm.cli.conditions import CONDITION_HELP, Subject, add_condition_flags, parse_budget, read_subject
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.cli.simulate.flags import add_engine_flags, engine_options
from eventlm.cli.trace_path import add_strict_flag, trace_file
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import ExitCode, UsageError
from eventlm.formatting import counted
from eventlm.system.processors import usable_cores
from eventlm.table import aligned, table

if TYPE_CHECKING:
    from eventlm.replay.bisect.first_event import FoundEvent
    from eventlm.replay.bisect.settings import DecidingSettings
    from eventlm.replay.bisect.threshold import Threshold
    from eventlm.replay.predicate.oracle import Oracle

_RANGE = re.compile(r"(?P<name>\w+)=(?P<low>[^.]+(?:\.[0-9]+[^.]*)?)\.\.(?P<high>.+)")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Find where something begins. With --when, the first event of a trace at which an expression holds. With --over and
--keep, the value of a setting at which a condition begins or ends to hold in simulations. With two traces and
--keep, which of the settings that differ between their engines make it hold.

The --over range is sampled first. If the condition changes more than once in it, that is said, and the first
change is found exactly."""
    parser.usage = (
        "eventlm bisect TRACE --when EXPR\n"
        "       eventlm bisect TRACE|WORKLOAD --over NAME=LOW..HIGH --keep PRED [flags]\n"
        "       eventlm bisect TRACE_A TRACE_B --keep PRED [flags]"
    )
    parser.epilog = (
        """\
examples:
  eventlm bisect runs/latest --when 'event == "preempt" and request == 17'
  eventlm bisect runs/latest --over blocks=500..8000 --keep 'preemptions > 50'
  eventlm bisect W.jsonl --cost-model h200-llama3-8b --over load=50%..300% \\
    --keep 'p99(ttft) > 2s'
  eventlm bisect runs/slow runs/fast --keep 'p99(ttft) > 2s'

NAME is blocks, seqs, budget, load (a factor on the arrival rate), or a number
among the engine's options, such as max_skips.

EXPR is about one event: event (its kind), time, and its fields as `eventlm
trace grep` shows them. A list counts as its length.

"""
        + CONDITION_HELP
        + "\n\n"
        + exit_code_lines(
            ExitCode.OK,
            ExitCode.USAGE,
            ExitCode.DAMAGED,
            meanings={ExitCode.DIFFERENT: "it holds nowhere, or changes nowhere"},
        )
    )
    parser.add_argument("paths", metavar="TRACE", nargs="+", help="a trace, the folder of a run, or a workload file")
    parser.add_argument("--when", metavar="EXPR", help="an expression about one event")
    parser.add_argument("--over", metavar="NAME=LOW..HIGH", help="a setting and its range")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_condition_flags(parser, required=False)
    add_strict_flag(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Find it and print it."""
    budget = parse_budget(arguments.budget)
    paths = arguments.paths
    if len(paths) > 2 or (len(paths) == 2 and (arguments.over or arguments.when)):
        raise UsageError("--when and --over take one trace, and --keep without them two")
    if arguments.when is not None:
        if arguments.keep or arguments.over:
            raise UsageError("--when looks into a recorded run: leave --keep and --over out")
        return _first_event(arguments)
    if arguments.keep is None:
        raise UsageError("--keep PRED is missing, or --when EXPR (see eventlm bisect --help)")
    if len(paths) == 2 and engine_options(arguments):
        raise UsageError("two traces bring their engines: leave the engine's flags out")
    if len(paths) == 1 and arguments.over is None:
        raise UsageError("say what to bisect: --over NAME=LOW..HIGH, or a second trace")
    from eventlm.cli.output import count_progress
    from eventlm.replay.expressions.parser import parse
    from eventlm.replay.predicate.environment import check_condition
    from eventlm.replay.predicate.oracle import Oracle

    check_condition(parse(arguments.keep))
    over = None if arguments.over is None else _parse_range(arguments.over)
    subject = read_subject(paths[0], arguments)
    for note in subject.notes:
        print(f"eventlm: note: {note}", file=sys.stderr)
    jobs = usable_cores() if arguments.jobs is None else arguments.jobs
    with count_progress("bisecting", "simulation") as on_progress:

        def on_trial(num_trials: int) -> None:
            if on_progress is not None:
                on_progress(num_trials, budget.num_trials or 0)

        with Oracle(arguments.keep, subject.cost, num_jobs=jobs, budget=budget, on_trial=on_trial) as oracle:
            if over is not None:
                return _threshold(arguments, oracle, subject, *over)
            return _settings(arguments, oracle, subject)


def _first_event(arguments: argparse.Namespace) -> int:
    from eventlm.cli.output import file_progress, print_report
    from eventlm.replay.bisect.first_event import first_event
    from eventlm.replay.expressions.parser import parse

    expression = parse(arguments.when)
    path = trace_file(arguments.paths[0])
    with file_progress("looking", path) as on_progress:
        found = first_event(path, expression, strict=arguments.strict, on_progress=on_progress)
    print_report(_event_lines(found), found if arguments.json else None, warnings=found.warnings)
    return ExitCode.OK if found.event is not None else ExitCode.DIFFERENT


def _event_lines(found: FoundEvent) -> Iterator[str]:
    from eventlm.events.codec import encode_body

    if found.event is None:
        yield f"it holds at none of {counted(found.num_events, 'event')}"
        return
    event = found.event
    yield f"event {event.s:,}, {event.ts / 1e9:,.6f} s after the start of the run"
    yield encode_body(event).decode() + "}"


def _parse_range(text: str) -> tuple[str, int, int]:
    """The option and its range. Raises UsageError."""
    from eventlm.replay.bisect.threshold import setting_named
    from eventlm.replay.expressions.tokens import tokenize

    match = _RANGE.fullmatch(text)
    if match is None:
        raise UsageError(f"--over {text}: write NAME=LOW..HIGH, such as blocks=500..8000")
    ends = []
    for end in (match["low"], match["high"]):
        first, *rest = tokenize(end)
        if first.kind != "number" or len(rest) != 1:
            raise UsageError(f"--over {text}: {end!r} is not a number, such as 500, 8k or 150%")
        ends.append(first.value)
    return setting_named(match["name"]), ends[0], ends[1]


def _threshold(arguments: argparse.Namespace, oracle: Oracle, subject: Subject, name: str, low: int, high: int) -> int:
    from eventlm.cli.output import print_report
    from eventlm.replay.bisect.threshold import find_threshold
    from eventlm.replay.predicate.oracle import Variant

    found = find_threshold(oracle, Variant(subject.workload, subject.options), name, low, high)
    print_report(_threshold_lines(found, arguments.keep), found if arguments.json else None)
    return ExitCode.OK if found.below is not None else ExitCode.DIFFERENT


def _threshold_lines(found: Threshold, condition: str) -> Iterator[str]:
    if found.below is None or found.above is None:
        does = "holds" if found.samples[0].holds else "does not hold"
        yield f"{condition} {does} at any value of {found.name} that was tried"
    else:
        here, there = (found.above, found.below) if found.holds_above else (found.below, found.above)
        yield f"{condition} holds at {found.name} = {_value(found, here)} and not at {_value(found, there)}"
    if not found.is_monotone:
        yield "It changes more than once in this range; this is the first change."
    yield ""
    rows = [[_value(found, each.value), each.error or ("yes" if each.holds else "no")] for each in found.samples]
    yield from table((found.name, "holds"), rows, left=(1,))


def _value(found: Threshold, value: int) -> str:
    from eventlm.replay.bisect.threshold import LOAD

    return f"{value / 10_000:g}%" if found.name == LOAD else f"{value:,}"


def _settings(arguments: argparse.Namespace, oracle: Oracle, subject: Subject) -> int:
    from eventlm.bus.log_reader import LogReader
    from eventlm.cli.output import print_report
    from eventlm.replay.bisect.settings import find_settings
    from eventlm.replay.predicate.recorded_options import recorded_options

    engines = []
    for text in arguments.paths:
        with LogReader(trace_file(text)) as log:
            engines.append(recorded_options(log.header, trust_local_plugins=arguments.trust_local_plugins))
    found = find_settings(oracle, subject.workload, *engines)
    print_report(_settings_lines(found, arguments), found if arguments.json else None)
    return ExitCode.OK


def _settings_lines(found: DecidingSettings, arguments: argparse.Namespace) -> Iterator[str]:
    held, other = arguments.paths if found.holds_in_first else reversed(arguments.paths)
    yield f"With the requests of {arguments.paths[0]}, {arguments.keep}"
    yield f"holds with the settings of {held}, and not with those of {other}."
    all_of = counted(len(found.differing), "setting")
    yield f"Of {all_of} that differ, {'this one makes' if len(found.deciding) == 1 else 'these make'} it hold:"
    yield ""
    yield from aligned(
        (each.name, f"{_setting(each.where_holds)} (not with {_setting(each.where_not)})") for each in found.deciding
    )


def _setting(value: Any) -> str:
    return format_plugin_spec(value) if isinstance(value, dict) else str(value)
