"""Runs of a seed, or of what is left of it, and how they end."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, structs

from tests.world.invariants.checks import BrokenInvariant
from tests.world.machine.world import StuckError
from tests.world.plans.plan import PACES, Plan, draw_plan
from tests.world.run import Ran, Run, quiet
from tests.world.swarm import handlers
from tests.world.swarm.timeline import write_timeline


class Case(NamedTuple):
    """A seed, at a pace of its own or at one of `PACES`, for so many hours if that is not 0; without some of its visits
    and faults. is_twice: it is to be run again in a fresh process, and all bytes must be the same.
    """

    seed: int
    pace: str = ""
    hours: int = 0
    without_visits: tuple[int, ...] = ()
    without_faults: tuple[int, ...] = ()
    is_twice: bool = False

    @property
    def plan(self) -> Plan:
        """What is to happen."""
        pace = PACES[self.pace] if self.pace else None
        if pace is not None and self.hours:
            pace = pace._replace(hours=self.hours)
        return draw_plan(self.seed, pace).without({*self.without_visits}, {*self.without_faults})

    @property
    def arguments(self) -> list[str]:
        """Of the command that runs it."""
        options = {
            "--pace": self.pace,
            "--hours": self.hours,
            "--without-visits": ",".join(map(str, self.without_visits)),
            "--without-faults": ",".join(map(str, self.without_faults)),
        }
        given = [text for name, value in options.items() if value for text in (name, str(value))]
        return [str(self.seed), *given, *(["--twice"] if self.is_twice else [])]


class Failure(Struct, frozen=True):
    """name: the invariant that does not hold, or what else went wrong. detail: lines of text."""

    name: str
    detail: str


class Outcome(Struct, frozen=True):
    """ran or failure is there. handlers: those of errors that have run, of those that are watched."""

    ran: Ran | None = None
    failure: Failure | None = None
    handlers: list[str] = []


def run_case(case: Case, folder: Path | None = None) -> Outcome:
    """Run it once, here. folder: where its timeline and its traces are written to."""
    with quiet() as lines:
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
        return structs.replace(outcome, handlers=sorted(handlers.has_run))


def _failure_of(error: Exception) -> Failure:
    names = {BrokenInvariant: getattr(error, "name", ""), StuckError: "stuck"}
    return Failure(names.get(type(error), type(error).__name__), "".join(traceback.format_exception(error)))
