"""Runs of a seed, possibly without some of its visits and faults, and how they end."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, structs

from tests.world.invariants.checks import BrokenInvariant
from tests.world.machine.world import StuckError
from tests.world.plans.plan import PACES, Plan, draw_plan
from tests.world.run import Lines, Ran, Run, quiet
from tests.world.swarm import handlers
from tests.world.swarm.timeline import write_timeline


class Case(NamedTuple):
    """A seed to run, possibly without some of its visits and faults. pace: one of `PACES`; empty: the seed draws it.
    hours: with a pace: for how long; 0: as the pace says. is_twice: run it again in a new process, and expect all bytes
    to be the same.
    """

    seed: int
    pace: str = ""
    hours: int = 0
    without_visits: tuple[int, ...] = ()
    without_faults: tuple[int, ...] = ()
    is_twice: bool = False

    @property
    def plan(self) -> Plan:
        """The plan of the case."""
        pace = PACES[self.pace] if self.pace else None
        if pace is not None and self.hours:
            pace = pace._replace(hours=self.hours)
        return draw_plan(self.seed, pace).without({*self.without_visits}, {*self.without_faults})

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command that runs the case."""
        options = {
            "--pace": self.pace,
            "--hours": self.hours,
            "--without-visits": ",".join(map(str, self.without_visits)),
            "--without-faults": ",".join(map(str, self.without_faults)),
        }
        given = [text for name, value in options.items() if value for text in (name, str(value))]
        return [str(self.seed), *given, *(["--twice"] if self.is_twice else [])]


class Failure(Struct, frozen=True):
    """How a case failed. name: the invariant that does not hold, or what else went wrong. detail: lines of text."""

    name: str
    detail: str


class Outcome(Struct, frozen=True):
    """How a case ended: `ran` or `failure` is set. handlers: the watched error handlers that have run."""

    ran: Ran | None = None
    failure: Failure | None = None
    handlers: list[str] = []


def run_case(case: Case, folder: Path | None = None) -> Outcome:
    """Run a case once, in this process. folder: where its timeline and traces are written."""
    # The world must not outlive `quiet`, which silences what it leaves.
    with quiet() as lines:
        # `is_heard` changes with the world that is there.
        handlers.counts = lambda: lines.is_heard()
        outcome = _run_in(lines, case, folder)
    return structs.replace(outcome, handlers=sorted(handlers.has_run))


def _run_in(lines: Lines, case: Case, folder: Path | None) -> Outcome:
    run = Run(case.plan, lines)
    if folder is not None:
        run.world.notes = []
    try:
        outcome = Outcome(ran=run.run())
    except Exception as error:
        outcome = Outcome(failure=_failure_of(error))
    if folder is not None:
        failure = outcome.failure
        write_timeline(folder, run.world, "it passed" if failure is None else f"{failure.name}\n{failure.detail}")
    return outcome


def _failure_of(error: Exception) -> Failure:
    names = {BrokenInvariant: getattr(error, "name", ""), StuckError: "stuck"}
    return Failure(names.get(type(error), type(error).__name__), "".join(traceback.format_exception(error)))
