"""What a section finds: rows of the table, and what they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

#: `failed`: an error, or a wrong result. `measured`: there is no target, or a smoke run, whose times say nothing.
Outcome = Literal["met", "missed", "failed", "skipped", "measured"]


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the table. `limit` has the unit of `measured`. The target is the ratio's where there is one, else the
    measured value's. `is_result`: it says whether a result is right, and is failed, not missed, if it is not.
    """

    section: str = ""
    what: str
    measured: float | None = None
    unit: str = ""
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    target: float | None = None
    is_at_most: bool = False
    is_result: bool = False
    outcome: Outcome = "measured"
    note: str = ""


class Ceilings(Struct, frozen=True, kw_only=True):
    """What the device and the host give at most: bytes read and written a second, FLOPs of bfloat16 products a second,
    and steps of an empty Python loop a second.
    """

    device: str
    bytes_per_second: float
    flops_per_second: float
    python_steps_per_second: float


class SectionError(Exception):
    """A part cannot be measured; the message says why, and is the row's note."""


class Skip(Exception):
    """A part is not measured here; the message says why."""


class Context(Struct, frozen=True, kw_only=True):
    """The arguments of a section's `module`. `folder` is shared by all sections, for checkpoints and runs; `seconds` is
    what the section may take; parts in `skip` have been run before.
    """

    module: str
    smoke: bool
    folder: str
    seconds: float
    skip: list[str] = []

    @property
    def device(self) -> str:
        """What torch computes on here: in a smoke run kernels are interpreted on the CPU."""
        return "cpu" if self.smoke else "cuda"

    @property
    def ceilings(self) -> Ceilings:
        """Raises SectionError where there are none."""
        path = Path(self.folder) / CEILINGS_FILE
        if not path.exists():
            raise SectionError("there are no ceilings to compare with: that section failed")
        return msgspec.json.decode(path.read_bytes(), type=Ceilings)


CEILINGS_FILE = "ceilings.json"
Part = Callable[[], Iterator[Row]]
Parts = Mapping[str, Part]


def speed(
    what: str,
    measured: float,
    unit: str,
    *,
    limit: float | None = None,
    limit_name: str = "",
    target: float | None = None,
    note: str = "",
) -> Row:
    """A rate, beside a limit or a peer's rate; `target` is of the ratio where there is a limit, else of the rate."""
    ratio = measured / limit if limit else None
    score = measured if ratio is None else ratio
    return Row(
        what=what,
        measured=measured,
        unit=unit,
        limit=limit,
        limit_name=limit_name,
        ratio=ratio,
        target=target,
        outcome="measured" if target is None else "met" if score >= target else "missed",
        note=note,
    )


def cost(what: str, measured: float, unit: str, *, at_most: float | None = None, note: str = "") -> Row:
    """A time, or a share, that should be small."""
    outcome: Outcome = "measured" if at_most is None else "met" if measured <= at_most else "missed"
    return Row(what=what, measured=measured, unit=unit, target=at_most, is_at_most=True, outcome=outcome, note=note)


def check(
    what: str, measured: float, unit: str, *, at_most: float | None = None, at_least: float = -math.inf, note: str = ""
) -> Row:
    """Whether a result is right: one beyond its bound, or no number, is a failure."""
    is_right = measured >= at_least if at_most is None else measured <= at_most
    target = at_least if at_most is None else at_most
    outcome: Outcome = "met" if is_right else "failed"
    return Row(
        what=what,
        measured=measured,
        unit=unit,
        target=target,
        is_at_most=at_most is not None,
        is_result=True,
        outcome=outcome,
        note=note,
    )
