"""`eventlm bisect`: where something begins."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eventlm.cli.conditions import (
    CONDITION_HELP,
    Subject,
    add_condition_flags,
    flags_of_a_simulation,
    parse_budget,
    read_subject,
)
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.cli.simulate.flags import MAX_SPEED_UP, add_engine_flags, given_engine_options
from eventlm.cli.trace_path import trace_file
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import ExitCode, UsageError
from eventlm.formatting import counted
from eventlm.system.processors import usable_cores
from eventlm.table import aligned, table
from eventlm.types import parts_per_million

if TYPE_CHECKING:
    from eventlm.replay.bisect.first_event import FoundEvent
    from eventlm.replay.bisect.settings import DecidingSettings, Setting
    from eventlm.replay.bisect.threshold import SampledValue, Threshold
    from eventlm.replay.debugger.condition import Condition
    from eventlm.replay.predicate.oracle import Oracle

#: What has no unit of time and is no share.
_COUNT = re.compile(r"[0-9_.]+[kM]?")
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
  eventlm bisect runs/latest --when 'free < 5 and running > 3'
  eventlm bisect runs/latest --over blocks=500..8000 --keep 'preemptions > 50'
  eventlm bisect W.jsonl --cost-model h200-llama3-8b --over load=50%..300% \\
    --keep 'p99(ttft) > 2s'
  eventlm bisect runs/slow runs/fast --keep 'p99(ttft) > 2s'

NAME is blocks, seqs, tokens (of a step), load (a factor on the arrival rate,
such as 0.5 or 50%), or a number among the engine's options, such as max_skips.
Values that the engine refuses are left out, and that is said.

EXPR is one of eventlm debug: it names fields of an event (event is its kind),
gauges of a replica, such as free and running, or the scheduler's state.
`eventlm debug -c "help expressions"` lists all names. For gauges and states
the run is indexed first. The index is kept.

"""
        + CONDITION_HELP
        + "\n\n"
        + exit_code_lines(
            ExitCode.OK,
            ExitCode.USAGE,
            ExitCode.DAMAGED,
            ExitCode.TORN,
            ExitCode.INVARIANT,
            ExitCode.LIVENESS,
            ExitCode.VERSION,
            meanings={
                ExitCode.FAILED: "the budget is spent, and nothing was found",
                ExitCode.DIFFERENT: "it holds nowhere or changes nowhere, or the run diverges from its replay",
            },
        )
    )
    parser.add_argument("paths", metavar="TRACE", nargs="+", help="a trace, the folder of a run, or a workload file")
    parser.add_argument("--when", metavar="EXPR", help="an expression about events, gauges or the scheduler's state")
    parser.add_argument("--no-verify", action="store_true", help="answer --when without a replay, from the log alone")
    parser.add_argument("--over", metavar="NAME=LOW..HIGH", help="a setting and its range")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_condition_flags(parser, required=False)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Find it and print it."""
    budget = parse_budget(arguments.budget)
    paths = arguments.paths
    if len(paths) > 2 or (len(paths) == 2 and (arguments.over or arguments.when)):
        raise UsageError("--when and --over take one trace, and --keep without them two")
    if arguments.when is not None:
        if simulating := flags_of_a_simulation(arguments):
            raise UsageError(f"--when looks into a recorded run: leave {' and '.join(simulating)} out")
        return _first_event(arguments)
    if arguments.no_verify:
        raise UsageError("--no-verify belongs to --when: leave it out")
    if arguments.keep is None:
        raise UsageError("--keep PRED is missing, or --when EXPR (see eventlm bisect --help)")
    if len(paths) == 2 and given_engine_options(arguments):
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
    subject.print_notes()
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
    from eventlm.cli.output import print_report
    from eventlm.replay.debugger.condition import Condition

    condition = Condition(arguments.when)
    find = _find_in_log if condition.is_of_events else _find_in_index
    found = find(trace_file(arguments.paths[0]), condition, arguments)
    print_report(_event_lines(found), found if arguments.json else None, warnings=found.warnings)
    return ExitCode.OK if found.event is not None else ExitCode.DIFFERENT


def _find_in_log(path: str, condition: Condition, arguments: argparse.Namespace) -> FoundEvent:
    from eventlm.cli.output import file_progress
    from eventlm.replay.bisect.first_event import first_event

    with file_progress("looking", path) as on_progress:
        return first_event(path, condition, strict=arguments.strict, on_progress=on_progress)


def _find_in_index(path: str, condition: Condition, arguments: argparse.Namespace) -> FoundEvent:
    from eventlm.cli.output import SECONDS_BEFORE_BAR, count_progress, file_progress
    from eventlm.replay.bisect.first_event import first_event_of_index
    from eventlm.replay.debugger.session import Session

    with file_progress("indexing", path) as on_progress:
        session = Session.open(
            path,
            verify=not arguments.no_verify,
            trust_local_plugins=arguments.trust_local_plugins,
            on_progress=on_progress,
        )
    with session, count_progress("looking", "event", delay=SECONDS_BEFORE_BAR) as on_progress:
        session.interrupt.on_progress = on_progress
        return first_event_of_index(session, condition, strict=arguments.strict)


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
    from eventlm.replay.bisect.threshold import LOAD, setting_named

    match = _RANGE.fullmatch(text)
    if match is None:
        raise UsageError(f"--over {text}: write NAME=LOW..HIGH, such as blocks=500..8000")
    name = setting_named(match["name"])
    read = _load if name == LOAD else _whole_number
    return name, read(match["low"], text), read(match["high"], text)


def _load(text: str, over: str) -> int:
    """A factor such as 1.5, or a share such as 150%, in parts per million."""
    try:
        factor_ppm = parts_per_million(text.removesuffix("%")) // (100 if text.endswith("%") else 1)
    except ValueError:
        factor_ppm = 0
    if not 0 < factor_ppm <= MAX_SPEED_UP * 1_000_000:
        raise UsageError(f"--over {over}: {text!r} is no factor of the arrival rate, such as 0.5 or 50%")
    return factor_ppm


def _whole_number(text: str, over: str) -> int:
    from eventlm.replay.expressions.tokens import tokenize

    first, *rest = tokenize(text)
    if first.kind != "number" or len(rest) != 1 or not _COUNT.fullmatch(first.text):
        raise UsageError(f"--over {over}: {text!r} is not a number, such as 500 or 8k")
    return first.value


def _threshold(arguments: argparse.Namespace, oracle: Oracle, subject: Subject, name: str, low: int, high: int) -> int:
    from eventlm.cli.output import print_report
    from eventlm.replay.bisect.threshold import find_threshold
    from eventlm.replay.predicate.oracle import Variant

    found = find_threshold(oracle, Variant(subject.workload, subject.options), name, low, high)
    print_report(_threshold_lines(found, arguments.keep), found if arguments.json else None, warnings=subject.warnings)
    if found.below is not None:
        return ExitCode.OK
    return ExitCode.FAILED if found.stopped else ExitCode.DIFFERENT


def _threshold_lines(found: Threshold, condition: str) -> Iterator[str]:
    valid = [sample for sample in found.samples if not sample.error]
    if found.below is not None and found.above is not None:
        here, there = (found.above, found.below) if found.holds_above else (found.below, found.above)
        yield f"{condition} holds at {found.name} = {_value(found, here)} and not at {_value(found, there)}"
    elif valid:
        does = "holds" if valid[0].holds else "does not hold"
        yield f"{condition} {does} at any value of {found.name} that was tried"
    if found.stopped:
        yield f"The search ended early: {found.stopped}"
    for last, beyond, side in _limits(found):
        yield f"{side} {_value(found, last)} it cannot be simulated: {beyond.error}"
    if not found.is_monotone:
        yield "It changes more than once in this range; this is the first change."
    yield ""
    rows = [
        [_value(found, each.value), "cannot be simulated" if each.error else "yes" if each.holds else "no"]
        for each in found.samples
    ]
    yield from table((found.name, "holds"), rows, left=(1,))


def _limits(found: Threshold) -> Iterator[tuple[int, SampledValue, str]]:
    """The first and last value that can be simulated, and the neighbours that cannot."""
    for before, after in pairwise(found.samples):
        if before.error and not after.error:
            yield after.value, before, "Below"
        elif after.error and not before.error:
            yield before.value, after, "Above"


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
    print_report(_settings_lines(found, arguments), found if arguments.json else None, warnings=subject.warnings)
    return ExitCode.OK


def _settings_lines(found: DecidingSettings, arguments: argparse.Namespace) -> Iterator[str]:
    held, other = arguments.paths if found.holds_in_first else reversed(arguments.paths)
    yield f"With the requests of {arguments.paths[0]}, {arguments.keep}"
    yield f"holds with the settings of {held}, and not with those of {other}."
    all_of = counted(len(found.differing), "setting")
    yield f"Of {all_of} that differ, {'this one makes' if len(found.deciding) == 1 else 'these make'} it hold:"
    yield ""
    yield from aligned((each.name, _deciding_line(each)) for each in found.deciding)
    if found.stopped:
        yield ""
        yield f"Fewer may do: {found.stopped}"


def _deciding_line(setting: Setting) -> str:
    other = f"not with {_setting(setting.where_not)}"
    if setting.error:
        other = f"with {_setting(setting.where_not)} it cannot be simulated: {setting.error}"
    return f"{_setting(setting.where_holds)} ({other})"


def _setting(value: Any) -> str:
    return format_plugin_spec(value) if isinstance(value, dict) else str(value)
