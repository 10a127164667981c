"""What commands answer: as lines for a terminal, and as objects for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.formatting import counted
from eventlm.replay.expressions.evaluation import Value
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

#: Rows of a table that a terminal gets; programs get all.
_MAX_ROWS = 40


def seconds(ns: int) -> str:
    """Time of the run: `12.345678 s`."""
    return f"{ns / NANOSECONDS_PER_SECOND:,.6f} s"


class Result(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What a command answers."""

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        raise NotImplementedError

    def to_object(self) -> dict[str, Any]:
        """As JSON has it. `kind` says which result it is; times are nanoseconds."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class ReplicaGauges(Struct, frozen=True, kw_only=True):
    """What a replica has at a position; -1: not known."""

    replica: int
    waiting: int
    running: int
    partial: int = -1
    free: int = -1
    cached: int = -1
    held: int = -1
    in_flight: int = -1

    def line(self) -> str:
        """In one line, without what is not known."""
        names = ("running", "partial", "waiting", "in_flight", "free", "cached", "held")
        known = [f"{name.replace('_', ' ')} {getattr(self, name):,}" for name in names if getattr(self, name) >= 0]
        return f"replica {self.replica}: {', '.join(known)}"


class Stop(Result, frozen=True, kw_only=True, tag="stop"):
    """The position.

    s, ts, event: of the event, `line` its line, shortened. state_s: the state is the one after this event; -1: there is
    none, and `note` says why. is_inside_drain: more facts are to come before the next plan. why: why it stopped here.
    """

    s: int
    ts: int
    event: str
    line: str
    state_s: int = -1
    is_inside_drain: bool = False
    policy: str = ""
    replicas: list[ReplicaGauges] = []
    why: list[str] = []
    note: str = ""

    def lines(self) -> Iterator[str]:
        yield from self.why
        yield f"event {self.s:,} at {seconds(self.ts)}: {self.line}"
        if self.state_s >= 0 and self.state_s != self.s:
            yield f"  the state is that after event {self.state_s:,}, the fact that led to this decision"
        if self.is_inside_drain:
            yield "  inside a drain: its other facts, and the plans made of them, are still to come"
        if self.note:
            yield f"  {self.note}"
        for each in self.replicas:
            yield f"  {each.line()}"


class TableResult(Result, frozen=True, kw_only=True, tag="table"):
    """Rows. title: what they are, and at which position. columns ending in `_ns` hold nanoseconds. notes: below."""

    title: str
    columns: list[str]
    rows: list[list[Value]]
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        yield self.title
        if self.rows:
            names = [_heading(name) for name in self.columns]
            shown = [
                [_cell(name, value) for name, value in zip(self.columns, row, strict=True)]
                for row in self.rows[:_MAX_ROWS]
            ]
            is_text = [any(isinstance(row[index], str) for row in self.rows) for index in range(len(names))]
            yield from table(names, shown, left=[index for index, each in enumerate(is_text) if each])
        if len(self.rows) > _MAX_ROWS:
            yield f"and {counted(len(self.rows) - _MAX_ROWS, 'more row')}"
        yield from self.notes


class TextResult(Result, frozen=True, kw_only=True, tag="text"):
    """Paragraphs."""

    text: list[str]

    def lines(self) -> Iterator[str]:
        yield from self.text


class ReportResult(Result, frozen=True, kw_only=True, tag="report"):
    """The answer of another tool: `text` for people, `report` for programs."""

    text: list[str]
    report: dict[str, Any]

    def lines(self) -> Iterator[str]:
        yield from self.text


def _heading(name: str) -> str:
    return f"{name.removesuffix('_ns').replace('_', ' ')}{', ms' if name.endswith('_ns') else ''}"


def _cell(name: str, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value / NANOSECONDS_PER_MILLISECOND:,.3f}" if name.endswith("_ns") else f"{value:,}"
    return value


def sequence_name(identity: Sequence[int], num_samples: int = 1) -> str:
    """As commands take it: `17`, or `17.1` for one of several samples."""
    return f"{identity[0]}.{identity[1]}" if num_samples > 1 or identity[1] else str(identity[0])
