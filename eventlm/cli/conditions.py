"""What `eventlm shrink` and `eventlm bisect` have in common: a condition, what it is tried on, and how long."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.cli.parser import Parser, add_number
from eventlm.cli.simulate.flags import COST_MODEL_HELP, given_engine_options, read_cost_model
from eventlm.cli.time_window import nanoseconds
from eventlm.cli.trace_path import add_strict_flag, add_trust_flag, trace_file
from eventlm.config.options import options
from eventlm.errors import UsageError
from eventlm.types import NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from eventlm.replay.cost.files import FileCost
    from eventlm.replay.predicate.oracle import Budget
    from eventlm.replay.workload.workload import Workload

#: For the epilogs of both commands.
CONDITION_HELP = """\
A condition compares figures of the simulated run:
  p50, p90, p95, p99, max, mean (LATENCY, FILTER)   of ttft, tpot, e2e or queue
  count(FILTER)                     sequences that ended
  preemptions, rejected, requests, completed, unfinished, steps, duration,
  tokens_per_second, hit_rate, plugin_failures
  diverges(policy=edf, by=10ms)     another engine serves a sequence otherwise
  broken                            the scheduler breaks one of its own rules

FILTER is about one sequence: prompt, output, cached, class, priority,
preemptions, request, sample, reason, arrived, or a latency. Times have units
(ms, s, min), shares a %. and, or, not, + - * / and parentheses work as usual."""


class Subject(NamedTuple):
    """A workload and the engine that serves it. options: pinned, so that a part of it meets the same engine.

    warnings: of a trace, such as that it is torn.
    """

    workload: Workload
    options: dict[str, Any]
    cost: FileCost
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def print_notes(self) -> None:
        """On stderr, before minutes of work."""
        for note in self.notes:
            print(f"eventlm: note: {note}", file=sys.stderr)


def add_condition_flags(parser: Parser, *, required: bool) -> None:
    """Add `--keep`, `--cost-model`, `--jobs`, `--budget`, `--strict` and `--trust-local-plugins`."""
    parser.add_argument("--keep", metavar="PRED", required=required, help="the condition, as below")
    parser.add_argument(
        "--cost-model", metavar="MODEL", help=f"{COST_MODEL_HELP} (default: fitted to the trace, if it is one)"
    )
    parser.add_argument(
        "--budget", metavar="N", help="stop after so many simulations, or after a time such as 90s or 10min"
    )
    add_number(parser, "--jobs", "simulations at once (default: one for each core)", least=1)
    add_trust_flag(parser)
    add_strict_flag(parser)


def flags_of_a_simulation(arguments: argparse.Namespace) -> list[str]:
    """Those that were given of a condition on a simulated run and of its engine."""
    flags = ["--over", "--keep", "--cost-model", "--jobs", "--budget"]
    given = [flag for flag in flags if getattr(arguments, flag[2:].replace("-", "_"), None)]
    return given + [options()[name].flag for name in given_engine_options(arguments)]


def parse_budget(text: str | None) -> Budget:
    """A number of simulations, or a time. Raises UsageError."""
    from eventlm.replay.predicate.oracle import Budget

    if text is None:
        return Budget()
    if text.isdecimal():
        if not int(text):
            raise UsageError("--budget 0: at least 1 simulation is needed")
        return Budget(num_trials=int(text))
    return Budget(seconds=nanoseconds(text, flag="--budget") / NANOSECONDS_PER_SECOND)


def read_subject(text: str, arguments: argparse.Namespace) -> Subject:
    """A workload file, or a trace with the engine that it was recorded with. The flags of the engine go before that.

    Raises UsageError, and what LogReader raises.
    """
    from eventlm.bus.log_reader import LogReader
    from eventlm.cli.output import file_progress
    from eventlm.replay.predicate.observation import pinned_options
    from eventlm.replay.predicate.recorded_options import recorded_options
    from eventlm.replay.workload.source import is_trace, load_workload

    path = trace_file(text)
    given = given_engine_options(arguments)
    cost_model = arguments.cost_model
    if is_trace(path):
        with LogReader(path) as log:
            found = recorded_options(log.header, given, trust_local_plugins=arguments.trust_local_plugins)
        cost_model = cost_model or path
    else:
        found = given
        if cost_model is None:
            raise UsageError(f"{text} is a workload file, which has no durations: give --cost-model")
    with file_progress("reading", path) as on_progress:
        loaded = load_workload(path, with_incidents=True, strict=arguments.strict, on_progress=on_progress)
    if len(loaded.workload.recorded) > 1:
        names = ", ".join(loaded.workload.recorded)
        raise UsageError(
            f"{text}: it is of several replicasets ({names}), and shrink and bisect are for one; `eventlm simulate` "
            "and `eventlm sweep` take it"
        )
    cost = read_cost_model(cost_model)
    pinned = pinned_options(loaded.workload, found, cost)
    return Subject(loaded.workload, pinned, cost, loaded.notes, loaded.warnings)
