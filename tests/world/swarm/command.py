"""The command that runs seeds of the simulated world: what it prints, and when it fails."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from eventlm.table import aligned, table
from tests.layout import ROOT
from tests.world.commit import Commit
from tests.world.plans.faults import FAULTS
from tests.world.plans.gateway_faults import GATEWAY_FAULTS
from tests.world.plans.plan import PACES, draw_gateway_plan, draw_plan
from tests.world.run import quiet, run_plan
from tests.world.swarm.cases import Case, Failure, run_case
from tests.world.swarm.handlers import all_handlers, has_run, watched
from tests.world.swarm.results import PAGE, Batch, Totals, add_batch, read_batches
from tests.world.swarm.shrink import shrink
from tests.world.swarm.swarm import Swarm
from tests.world.swarm.unreached import unreached

#: In this many seeds, each kind of fault must have struck.
_ENOUGH_SEEDS = 200
#: In this many seeds, each error handler must have run, except those that no seed can reach.
_ENOUGH_SEEDS_FOR_HANDLERS = 1000
#: From this many seeds on, it pays to run two in this process first.
_MANY_SEEDS = 10
#: One seed in this many is run twice.
_ONE_TWICE_IN = 20

_EPILOG = """\
examples:
  python -m tests.world.simulate 0-999
      on all cores; stops at the first seed that fails, and shrinks it
  python -m tests.world.simulate 1000-
      until one fails, or until Ctrl-C
  python -m tests.world.simulate 17 --without-faults 0,3 --timeline /tmp/seed-17
      one seed with fewer faults; then read /tmp/seed-17/timeline.txt, and
      eventlm report /tmp/seed-17/runs/latest
  python -m tests.world.simulate 1-4 --pace quiet --hours 4800 --limit 30000
      200 days of a server that few use

A seed draws the server's configuration, its clients and its faults. Each visit
and each fault has a number and is drawn by it, so the rest stays as it is when
some are left out. One seed in twenty is run again in a new process, whose texts
have other hashes: all bytes must be the same. Of 200 seeds or more each kind of
fault must have struck: a full disk that nobody writes to has not. Of 1000 or
more each handler of errors of the server must have run, but those of which
tests/world/swarm/unreached.py says why nothing here leads to them.
Exit status 1: something failed.
"""


def run(arguments: list[str] | None = None) -> int:
    """Exit status 0: all seeds passed; 1: something failed."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.hours and not args.pace:
        parser.error("--hours needs --pace: without one, the seed says how long it is")
    seeds = _Seeds(args)
    if args.print_outcome:
        sys.stdout.buffer.write(msgspec.json.encode(run_case(next(seeds.cases()))))
        return 0
    if args.timeline is not None:
        return _run_one(next(seeds.cases()), args.timeline)
    if args.add_to_results and (problem := seeds.why_not_added()):
        print(problem, file=sys.stderr)
        return 2
    return _run_all(args, seeds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world.simulate",
        description="Run the whole server in simulated time, under faults that seeds draw.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seeds", type=_range, metavar="SEEDS", help="17, 0-999, or 1000- for no end")
    parser.add_argument("--without-visits", type=_numbers, default=(), metavar="N,N", help="leave these clients out")
    parser.add_argument("--without-faults", type=_numbers, default=(), metavar="N,N", help="leave these faults out")
    paces = "; ".join(
        f"{name}: {pace.visits_per_hour} requests and {pace.faults_per_hour} faults an hour, for {pace.hours} h"
        for name, pace in PACES.items()
    )
    parser.add_argument(
        "--pace", choices=PACES, default="", help=f"how much happens, in place of what is drawn. {paces}"
    )
    parser.add_argument("--hours", type=int, default=0, metavar="N", help="with --pace: for how long")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and not one in twenty")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes at once; default: %(default)s"
    )
    parser.add_argument(
        "--limit", type=float, default=300, metavar="S", help="seconds that a seed may take; default: %(default)s"
    )
    parser.add_argument(
        "--shrink", type=float, default=120, metavar="S", help="seconds to shrink a failure; default: %(default)s"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="DIR", help="run one seed; write what happened, and its traces"
    )
    parser.add_argument("--add-to-results", action="store_true", help=f"add what was run to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--coverage", action="store_true", help="list the handlers of errors that have not run")
    parser.add_argument("--print-outcome", action="store_true", help=argparse.SUPPRESS)
    return parser


def _range(text: str) -> tuple[int, int | None]:
    """The first and last seed; the last is None for no end."""
    first, dash, last = text.partition("-")
    found = int(first), int(last) if last else None if dash else int(first)
    if found[1] is not None and found[1] < found[0]:
        raise ValueError
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


class _Seeds:
    """The seeds of the command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.commit = Commit()

    def cases(self) -> Iterator[Case]:
        """All cases, in order."""
        args = self._args
        first, last = args.seeds
        for seed in itertools.count(first) if last is None else range(first, last + 1):
            is_twice = args.twice or (first != last and seed % _ONE_TWICE_IN == 0)
            yield Case(seed, args.pace, args.hours, args.without_visits, args.without_faults, is_twice)

    def why_not_added(self) -> str:
        """Why the seeds cannot be added to the totals; empty if they can."""
        args = self._args
        if why := self.commit.why_not_added:
            return why
        if args.without_visits or args.without_faults:
            return "seeds without some of their visits or faults cannot be added to the results"
        for batch in read_batches():
            first, last = map(int, batch.seeds.split("-"))
            if (
                batch.commit == self.commit.name
                and batch.pace == args.pace
                and args.seeds[0] <= last
                and (args.seeds[1] is None or first <= args.seeds[1])
            ):
                return f"seeds {batch.seeds} of this commit are in the results already: choose others"
        return ""


def _run_one(case: Case, folder: Path) -> int:
    outcome = run_case(case, folder)
    print(f"{folder / 'timeline.txt'} has what happened; for its trace: eventlm report {folder / 'runs/latest'}")
    if outcome.failure is not None:
        print(f"{outcome.failure.name}\n{outcome.failure.detail}", file=sys.stderr)
    return int(outcome.failure is not None)


def _run_all(args: argparse.Namespace, seeds: _Seeds) -> int:
    # Processes that were started must be ended on SIGTERM too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    first, last = args.seeds
    if last is None or last - first >= _MANY_SEEDS:
        _load_modules()
    swarm = Swarm(num_jobs=args.jobs, limit_seconds=args.limit)
    totals, done, handlers, began = Totals(), list[int](), set[str](), time.monotonic()
    outcomes = swarm.run(seeds.cases())
    try:
        for case, outcome in outcomes:
            totals.add(outcome)
            done.append(case.seed)
            handlers.update(outcome.handlers)
            failures = totals.groups["failures"]
            _show_progress(totals, time.monotonic() - began)
            if outcome.failure is not None:
                is_first = failures[outcome.failure.name] == 1
                _report(case, outcome.failure, str(seeds.commit), args.shrink if is_first else 0, swarm)
                if not args.keep_going:
                    break
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        outcomes.close()
        signal.signal(signal.SIGTERM, before)
    print(*aligned(totals.rows()), sep="\n")
    print(*table(("fault", "set", "struck"), [*totals.fault_rows()]), sep="\n")
    print(f"{time.monotonic() - began:.0f} s in {args.jobs} processes at once, load average {os.getloadavg()[0]:.1f}")
    is_enough = not args.pace and len(done) >= _ENOUGH_SEEDS
    never = [kind for kind in FAULTS | GATEWAY_FAULTS if not totals.groups["faults"][kind]] if is_enough else []
    if never:
        print(f"these faults have never struck: {', '.join(never)}")
    is_enough = not args.pace and len(done) >= _ENOUGH_SEEDS_FOR_HANDLERS
    unrun = sorted(all_handlers() - handlers - unreached()) if watched and (is_enough or args.coverage) else []
    print(f"{len(handlers)} of {len(all_handlers())} handlers of errors have run")
    if unrun:
        print("these have not, and tests/world/swarm/unreached.py has no reason why:", *unrun, sep="\n  ")
    is_whole = done and len(done) == max(done) - min(done) + 1
    if args.add_to_results and not is_whole:
        print("some seeds between the others did not end, so nothing is added to the results", file=sys.stderr)
    elif args.add_to_results:
        add_batch(Batch(seeds.commit.name, f"{min(done)}-{max(done)}", args.pace, totals.groups))
    return int(bool(never or (unrun and is_enough)) or totals.groups["failures"].total() > 0)


def _load_modules() -> None:
    """Load everything that seeds load, so that forks inherit it; it would take each of them a second."""
    for plan in (draw_plan(0), draw_gateway_plan(0)):
        with contextlib.suppress(Exception):
            run_plan(plan)
    # Collect what those runs have left, with the log silenced.
    with quiet():
        pass
    has_run.clear()
    gc.freeze()


def _show_progress(totals: Totals, elapsed_seconds: float) -> None:
    seeds = totals.groups["seeds"]
    hours, num_failures = seeds["simulated seconds"] / 3600, totals.groups["failures"].total()
    line = (
        f"{seeds['seeds']:,} seeds, {hours:,.1f} simulated hours, {hours / elapsed_seconds:.2f} a second, "
        f"{seeds['requests']:,} requests, {totals.groups['faults'].total():,} faults struck, {num_failures} failures"
    )
    if sys.stderr.isatty():
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
    elif seeds["seeds"] % 100 == 0:
        print(line, file=sys.stderr, flush=True)


def _report(case: Case, failure: Failure, where: str, shrink_seconds: float, swarm: Swarm) -> None:
    """Print a failure, and the smaller case that `shrink_seconds` of shrinking leave."""
    print(f"\nseed {case.seed} at {where}: {failure.name}\n{failure.detail.rstrip()}\n\n  {_command(case)}", flush=True)
    if shrink_seconds:
        deadline = time.monotonic() + shrink_seconds

        def fails(fewer: Case) -> bool:
            found = swarm.outcome(fewer).failure
            return found is not None and found.name == failure.name

        fewer = shrink(case, fails, lambda: time.monotonic() < deadline)
        plan = fewer.plan
        rest = f"{len(plan.visits)} visits and {len(plan.faults)} faults"
        print(f"\nit also fails with {rest}:\n\n  {_command(fewer)}\n", flush=True)


def _command(case: Case) -> str:
    return shlex.join(["python", "-m", "tests.world.simulate", *case.arguments])
