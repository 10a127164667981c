"""`eventlm trace ACTION`: what a trace holds, whether it is whole, how to mend its end, and other traces beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from eventlm.cli.exit_codes import READING_A_TRACE, exit_code_lines
from eventlm.cli.parser import Parser
from eventlm.cli.progress import file_progress
from eventlm.cli.trace import diff as trace_diff
from eventlm.cli.trace import export as trace_export
from eventlm.cli.trace import grep as trace_grep
from eventlm.cli.trace import importing as trace_import
from eventlm.cli.trace import ls as trace_ls
from eventlm.cli.trace import stats as trace_stats
from eventlm.cli.trace_flags import add_strict_flag
from eventlm.cli.trace_path import HELP, LATEST, last_file, trace_file
from eventlm.cli.warnings import warn
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.errors import ExitCode, TraceCorruptError
from eventlm.formatting import counted
from eventlm.types import NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.bus.token_log_check import TokenLogCheck
    from eventlm.bus.trace_info import TraceCheck, TraceInfo
    from eventlm.events import PluginRecord

END_IN_WORDS = {
    "end": "a clean end",
    "no_end": "no clean end",
    "torn": "a torn last line",
    "still_being_written": "still being written",
}


class Action(NamedTuple):
    """A subcommand. reads_one: it takes one trace, the newest where none is named. can_be_strict: it has `--strict`."""

    name: str
    configure: Callable[[Parser], None]
    help: str
    description: str
    reads_one: bool = True
    can_be_strict: bool = True


def configure(parser: Parser) -> None:
    """Add the command's subcommands."""
    parser.description = "Find, look at, measure, check or repair the traces of runs, one file or several in a folder."
    parser.epilog = """\
examples:
  eventlm trace ls                    the recorded runs
  eventlm trace info                  the newest run of a server in numbers
  eventlm trace stats --plot DIR      its latencies and steps, with pictures
  eventlm trace grep --request 17     its lines about one request
  eventlm trace diff A B              where two runs decided otherwise
  eventlm trace export -o D  requests and steps as tables
  eventlm trace import --from azure F -o W.jsonl
                                      a public trace as a workload
  eventlm trace check runs/latest     every line against the hash chain
  eventlm trace repair runs/latest    cut off a half-written last line

""" + exit_code_lines(*READING_A_TRACE, ExitCode.DIFFERENT)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    for action in ACTIONS:
        subparser = actions.add_parser(action.name, help=action.help, description=action.description)
        action.configure(subparser)
        if action.reads_one:
            subparser.add_argument("path", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
        if action.can_be_strict:
            add_strict_flag(subparser)


def _configure_info(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, header included")
    parser.set_defaults(run=run_info)


def _configure_check(parser: Parser) -> None:
    parser.set_defaults(run=run_check)


def _configure_repair(parser: Parser) -> None:
    parser.set_defaults(run=run_repair)


def run_info(arguments: argparse.Namespace) -> int:
    """Print the run in numbers."""
    import msgspec

    from eventlm.bus.trace_info import info

    path = trace_file(arguments.path)
    with file_progress("reading", path) as on_progress:
        found = info(path, strict=arguments.strict, on_progress=on_progress)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        for name, value in _info_rows(found):
            print(f"{name:<10}  {value}")
    warn(found.check.warnings)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Print one line if the trace is sound, and one for its token ids; damage is an error with its own exit code."""
    from eventlm.bus.token_log_check import check_token_logs
    from eventlm.bus.trace_info import check

    path = trace_file(arguments.path)
    with file_progress("checking", path) as on_progress:
        found = check(path, strict=arguments.strict, on_progress=on_progress)
    end = END_IN_WORDS[found.end_state]
    events = f"{counted(found.num_events, 'event')}{_kept(found)}"
    print(f"{found.path}: ok, {events}, {counted(found.num_bytes, 'byte')}, {end}")
    warn(found.warnings)
    with file_progress("checking token ids", path) as on_progress:
        tokens = check_token_logs(path, on_progress=on_progress)
    return _tell_tokens(tokens) if tokens is not None else 0


def _tell_tokens(tokens: TokenLogCheck) -> int:
    """What is missing may have been removed on purpose; what is there must be whole."""
    warn([*tokens.missing, *tokens.damage])
    found = f"{counted(tokens.num_prompts, 'prompt')}, {counted(tokens.num_steps, 'step')}"
    if not tokens.is_sound:
        without = f"{counted(tokens.num_without, 'event')} without a sound line" if tokens.num_without else found
        raise TraceCorruptError(f"the token ids beside the trace are damaged: {without}; the trace itself is sound")
    if tokens.num_prompts or tokens.num_steps or not tokens.missing:
        print(f"token ids beside it: ok, {found}")
    return 0


def run_repair(arguments: argparse.Namespace) -> int:
    """Say what was cut off and where the old file is."""
    from eventlm.bus.trace_repair import repair

    result = repair(last_file(arguments.path))
    if not result.copy:
        print(f"{result.path}: {counted(result.num_lines, 'line')}, nothing to repair")
    else:
        print(
            f"{result.path}: cut off {counted(result.removed_bytes, 'byte')}, "
            f"{counted(result.num_lines, 'line')} left; "
            f"the file as it was is {result.copy}"
        )
    return 0


def _info_rows(info: TraceInfo) -> list[tuple[str, str]]:
    header, check, core = info.header, info.check, info.header.core
    started = datetime.fromtimestamp(int(header.unix_start_ns) // NANOSECONDS_PER_SECOND, UTC).isoformat()
    versions = f"format {header.format}, schema {header.schema}, behaviour {header.behaviour}"
    kinds = ", ".join(
        counted(number, noun)
        for number, noun in (
            (info.num_facts, "fact"),
            (info.num_decisions, "decision"),
            (info.num_markers, "marker"),
        )
    )
    num_finished = sum(info.finish_reasons.values())
    return [
        ("trace", f"{check.path}, {counted(check.num_bytes, 'byte')}, {END_IN_WORDS[check.end_state]}"),
        ("run", f"{header.run}, started {started}, {info.duration_ns / NANOSECONDS_PER_SECOND:,.3f} s"),
        ("written by", f"eventlm {header.code_version} ({versions})"),
        ("models", ", ".join(core.models)),
        ("plug-ins", ", ".join(map(_plugin, header.plugins))),
        (
            "replicas",
            f"{core.num_replicas}, each {counted(core.num_blocks, 'block')} of {counted(core.block_size, 'token')}",
        ),
        ("events", f"{check.num_events:,}: {kinds}{_kept(check)}"),
        ("requests", f"{info.num_requests:,}, {info.num_rejected:,} rejected{_counts(info.reject_reasons)}"),
        ("finished", f"{counted(num_finished, 'sequence')}{_counts(info.finish_reasons)}"),
        ("tokens", f"{info.num_prompt_tokens:,} prompt (of all that arrived), {info.num_output_tokens:,} output"),
        ("steps", f"{info.num_steps:,} launched, {counted(info.num_preemptions, 'preemption')}"),
    ]


def _kept(check: TraceCheck) -> str:
    """How much of the run they are, if that is not all in one file."""
    parts = [f"in {check.num_segments} files"] if check.num_segments > 1 else []
    parts += [f"from event {check.first_s:,} on, earlier ones are not in it"] if check.first_s else []
    return "".join(f", {part}" for part in parts)


def _plugin(plugin: PluginRecord) -> str:
    """A plug-in with all parameters that it ran with: what its defaults are is not told without importing it."""
    return f"{plugin.kind} {format_plugin_spec({'type': plugin.name} | plugin.parameters)}"


def _counts(counts: dict[str, int]) -> str:
    return ": " + ", ".join(f"{count:,} {name}" for name, count in counts.items()) if counts else ""


ACTIONS = (
    Action("info", _configure_info, "the run in numbers", "Print a trace's run in numbers."),
    Action(
        "stats",
        trace_stats.configure,
        "latencies, steps and replicas in tables and pictures",
        "Print the metrics of a trace: requests, steps, replicas, operations.",
    ),
    Action(
        "ls",
        trace_ls.configure,
        "the recorded runs of a folder",
        "List the recorded runs of a folder, the newest last.",
        reads_one=False,
        can_be_strict=False,
    ),
    Action(
        "grep",
        trace_grep.configure,
        "lines about a request, of a kind, of a time",
        "Print lines of a trace as they stand in the file: about a request, of a kind, of a time.",
    ),
    Action(
        "diff",
        trace_diff.configure,
        "two runs of one workload beside each other",
        "Compare two runs of one workload: their set-up, the first decision that differs, every request.",
        reads_one=False,
    ),
    Action(
        "export",
        trace_export.configure,
        "requests and steps as CSV or parquet",
        "Write the requests and the steps of a trace as two tables, for notebooks and databases.",
    ),
    Action(
        "import",
        trace_import.configure,
        "a public trace of real load as a workload file",
        "Turn a public trace of real load into a workload file, which `eventlm simulate` reads.",
        reads_one=False,
        can_be_strict=False,
    ),
    Action(
        "check",
        _configure_check,
        "verify hashes, order and fields of every line",
        "Verify hashes, order and fields of every line, and of the token ids that --record-tokens wrote. "
        "Damage is named by line and byte.",
    ),
    Action(
        "repair",
        _configure_repair,
        "cut off a half-written last line",
        "Cut off a half-written last line; the file as it was is kept beside it as *.broken.",
        can_be_strict=False,
    ),
)
