"""`eventlm trace ACTION`: look at, measure, check, repair and compare traces."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from eventlm.cli.output import file_progress, print_report, warn
from eventlm.cli.parser import READING_A_TRACE, Parser, exit_code_lines
from eventlm.cli.trace import diff as trace_diff
from eventlm.cli.trace import export as trace_export
from eventlm.cli.trace import grep as trace_grep
from eventlm.cli.trace import importing as trace_import
from eventlm.cli.trace import ls as trace_ls
from eventlm.cli.trace import stats as trace_stats
from eventlm.cli.trace_path import add_trace_argument, last_file, plugin_in_words, trace_file
from eventlm.core.recorded_layouts import layouts_in_words
from eventlm.errors import ExitCode, TraceCorruptError
from eventlm.formatting import counted, tally
from eventlm.table import aligned
from eventlm.types import NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.bus.token_log_check import TokenLogCheck
    from eventlm.bus.trace_info import TraceCheck, TraceInfo
    from eventlm.events import ReplicasetRecord

END_IN_WORDS = {
    "end": "a clean end",
    "no_end": "no clean end",
    "torn": "a torn last line",
    "still_being_written": "still being written",
}


def configure(parser: Parser) -> None:
    """Add the command's subcommands."""
    parser.description = "Find, look at, measure, check or repair the traces of runs, one file or several in a folder."
    parser.epilog = """\
examples:
  eventlm trace ls                    the recorded runs
  eventlm trace info                  the newest run of a server in numbers
  eventlm trace stats --plot plots    its latencies and steps, with pictures
  eventlm trace grep --request 17     its lines about one request
  eventlm trace diff A B              where two runs decided otherwise
  eventlm trace export -o tables      requests and steps as tables
  eventlm trace export --to perfetto -o run.pftrace
                                      the run as a timeline
  eventlm trace import --from azure F -o W.jsonl
                                      a public trace as a workload
  eventlm trace check runs/latest     every line against the hash chain
  eventlm trace repair runs/latest    cut off a half-written last line

""" + exit_code_lines(*READING_A_TRACE, ExitCode.DIFFERENT)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, (configure_action, summary) in ACTIONS.items():
        configure_action(actions.add_parser(name, help=summary))


def _configure_info(parser: Parser) -> None:
    parser.description = "Print a trace's run in numbers."
    parser.add_argument("--json", action="store_true", help="print one JSON object, header included")
    add_trace_argument(parser)
    parser.set_defaults(run=run_info)


def _configure_check(parser: Parser) -> None:
    parser.description = (
        "Verify hashes, order and fields of every line, and of the token ids that --record-tokens wrote. Damage is "
        "named by line and byte."
    )
    add_trace_argument(parser)
    parser.set_defaults(run=run_check)


def _configure_repair(parser: Parser) -> None:
    parser.description = "Cut off a half-written last line; the file as it was is kept beside it as *.broken."
    add_trace_argument(parser, can_be_strict=False)
    parser.set_defaults(run=run_repair)


def run_info(arguments: argparse.Namespace) -> int:
    """Print the run in numbers."""
    from eventlm.bus.trace_info import info

    path = trace_file(arguments.path)
    with file_progress("reading", path) as on_progress:
        found = info(path, strict=arguments.strict, on_progress=on_progress)
    print_report(aligned(_info_rows(found)), found if arguments.json else None, warnings=found.check.warnings)
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
    if tokens is not None:
        _report_tokens(tokens)
    return 0


def _report_tokens(tokens: TokenLogCheck) -> None:
    """What is missing may have been removed on purpose; what is there must be whole."""
    warn([*tokens.missing, *tokens.damage])
    found = f"{counted(tokens.num_prompts, 'prompt')}, {counted(tokens.num_steps, 'step')}"
    if not tokens.is_sound:
        without = f"{counted(tokens.num_without, 'event')} without a sound line" if tokens.num_without else found
        raise TraceCorruptError(f"the token ids beside the trace are damaged: {without}; the trace itself is sound")
    if tokens.num_prompts or tokens.num_steps or not tokens.missing:
        print(f"token ids beside it: ok, {found}")


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
    header, check = info.header, info.check
    started = datetime.fromtimestamp(int(header.unix_start_ns) // NANOSECONDS_PER_SECOND, UTC).isoformat()
    versions = f"format {header.format}, schema {header.schema}, behaviour {header.behaviour}"
    kinds = {"fact": info.num_facts, "decision": info.num_decisions, "marker": info.num_markers}
    in_kinds = ", ".join(counted(number, noun) for noun, number in kinds.items())
    num_finished = sum(info.finish_reasons.values())
    steps = f"{info.num_steps:,} launched, {counted(info.num_preemptions, 'preemption')}"
    num_attempts, num_failed = (info.events_by_tag.get(tag, 0) for tag in ("forward", "forward_failed"))
    attempts = f"{num_attempts:,} at backends, {num_failed:,} failed"
    return [
        ("trace", f"{check.path}, {counted(check.num_bytes, 'byte')}, {END_IN_WORDS[check.end_state]}"),
        ("run", f"{header.run}, started {started}, {info.duration_ns / NANOSECONDS_PER_SECOND:,.3f} s"),
        ("written by", f"eventlm {header.code_version} ({versions})"),
        *(row for each in header.sets for row in _set_rows(each)),
        *([("ranks", words)] if (words := layouts_in_words(header)) else []),
        ("events", f"{check.num_events:,}: {in_kinds}{_kept(check)}"),
        ("requests", f"{info.num_requests:,}, {info.num_rejected:,} rejected{_counts(info.reject_reasons)}"),
        ("finished", f"{counted(num_finished, 'sequence')}{_counts(info.finish_reasons)}"),
        ("tokens", f"{info.num_prompt_tokens:,} prompt (of all that arrived), {info.num_output_tokens:,} output"),
        *([("steps", steps)] if info.num_steps or not num_attempts else []),
        *([("attempts", attempts)] if num_attempts else []),
    ]


def _set_rows(found: ReplicasetRecord) -> list[tuple[str, str]]:
    core = found.core
    blocks = f"{counted(core.num_blocks, 'block')} of {counted(core.block_size, 'token')}"
    in_each = f" in each of {core.groups} KV groups" if core.groups > 1 else ""
    replicas = ("replicas", f"{core.num_replicas}, each {blocks}{in_each}")
    if core.forwards:
        replicas = ("backends", f"up to {core.num_replicas}, each taken to cache {blocks}")
    return [
        ("models", ", ".join(core.models)),
        ("plug-ins", ", ".join(map(plugin_in_words, found.plugins))),
        replicas,
    ]


def _kept(check: TraceCheck) -> str:
    """Which part of the run the events are, if it is not all in one file."""
    parts = [f"in {check.num_segments} files"] if check.num_segments > 1 else []
    parts += [f"from event {check.first_s:,} on, earlier ones are not in it"] if check.first_s else []
    return "".join(f", {part}" for part in parts)


def _counts(counts: dict[str, int]) -> str:
    return f": {tally(counts)}" if counts else ""


ACTIONS: dict[str, tuple[Callable[[Parser], None], str]] = {
    "info": (_configure_info, "the run in numbers"),
    "stats": (trace_stats.configure, "latencies, steps and replicas in tables and pictures"),
    "ls": (trace_ls.configure, "the recorded runs of a folder"),
    "grep": (trace_grep.configure, "lines about a request, of a kind, of a time"),
    "diff": (trace_diff.configure, "two runs of one workload beside each other"),
    "export": (trace_export.configure, "tables, timelines for trace viewers, or spans"),
    "import": (trace_import.configure, "a public trace of real load as a workload file"),
    "check": (_configure_check, "verify hashes, order and fields of every line"),
    "repair": (_configure_repair, "cut off a half-written last line"),
}
