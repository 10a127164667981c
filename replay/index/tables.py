"""The tables of an index: columns of 64-bit integers of equal length.

Times are ns of the run, positions those of events in the log. -1 stands for what is unknown, not reached, or nobody.
Texts (reasons, service classes, notes) are positions in the index's list of names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A column of a finished table.
Column = NDArray[np.int64]


class SequencePhase(IntEnum):
    """What a sequence was in, as `eventlm explain` names it."""

    EDGE = 0
    QUEUE = 1
    PREFILL = 2
    DECODE = 3
    PREEMPTED = 4
    RECOMPUTE = 5
    TEXT_END = 6
    UNSEEN = 7
    #: Waits to be sent to another server again.
    RETRY = 8


class MarkKind(IntEnum):
    """What a mark stands for."""

    PREEMPTED = 0
    REJECTED = 1
    FAILED = 2
    WORKER_UP = 3
    WORKER_LOST = 4
    DESYNCED = 5
    PLUGIN_FAILED = 6
    POLICY = 7
    PREDICTOR = 8
    PAUSED = 9
    RESUMED = 10
    CACHE_FLUSHED = 11
    FRONT_END_LOST = 12
    GAP = 13
    NOTE = 14
    CANCELLED = 15
    BACKEND_UP = 16
    BACKEND_DOWN = 17
    FORWARD_FAILED = 18
    RECOVERED = 19


class Schema(NamedTuple):
    """The name of a table and those of its columns."""

    name: str
    columns: tuple[str, ...]


#: One row for each sequence, in order of arrival; a rejected request has one row. `reason` is the finish reason, for a
#: rejected one `rejected: ...`, and `unknown` if the end lies in a gap. `launched_ns` is its first admission to a
#: replica. `deadline_ns`, `slo_*`: as in the request. `kind`: a name. `replica`: the latest. `best_hit_*`: the
#: most leading tokens of the prompt that any replica's cache held when the request arrived; -1 if that is not known.
#: `is_branch`: 1 for a branch of a beam search, whose first request stands for all of them in what counts requests.
#: `is_seen`: 0 if the arrival lies before the log or in a gap. `replicaset`: the one that it is for, by place in the
#: header.
REQUESTS = Schema(
    "requests",
    (
        "request",
        "index",
        "samples",
        "kind",
        "service_class",
        "priority",
        "session",
        "received_ns",
        "arrived_ns",
        "deadline_ns",
        "slo_ttft_ns",
        "slo_tpot_ns",
        "prompt_tokens",
        "max_tokens",
        "replica",
        "launched_ns",
        "first_token_ns",
        "last_token_ns",
        "ended_ns",
        "ended_s",
        "reason",
        "output_tokens",
        "cached_tokens",
        "best_hit_tokens",
        "best_hit_replica",
        "preemptions",
        "is_branch",
        "is_seen",
        "replicaset",
    ),
)
#: Phases of the sequences. `row`: in `requests`. A phase under way has `end_ns` -1. `first_step`, `last_step`: of the
#: replica's steps that were launched with the sequence during the phase.
PHASES = Schema("phases", ("row", "phase", "start_ns", "end_ns", "replica", "first_step", "last_step"))
#: Consecutive steps of a replica that a sequence was in: decodes (`is_chunk` 0), or chunks of its prompt.
#: tokens: of the chunks; of decodes the number of steps.
STRETCHES = Schema("stretches", ("row", "replica", "first_step", "last_step", "is_chunk", "tokens"))
#: Steps in order of their launches. `done_s`: the completion; -1: under way, or its worker was lost. `start_ns`,
#: `end_ns`: the worker's own. `busy_ns`: what lies between them; of a pipeline the time of its slowest stage. Of a
#: step that was in flight where the log begins, `launched_ns` is -1.
STEPS = Schema(
    "steps",
    (
        "replica",
        "epoch",
        "step",
        "launch_s",
        "launched_ns",
        "done_s",
        "start_ns",
        "end_ns",
        "completed_ns",
        "busy_ns",
        "decodes",
        "chunks",
        "tokens",
        "predicted_ns",
        "emitted",
    ),
)
#: When each stage of a pipeline had a step; a row for each, in order of the steps' completions.
STAGES = Schema("stages", ("replica", "step", "stage", "start_ns", "end_ns"))
#: Of several KV groups, the tokens that each computes of a step, in order of the launches.
LOADS = Schema("loads", ("replica", "step", "group", "tokens"))
#: Attempts to have other servers answer. `row`: in `requests`. `first_ns`: its first tokens. `end`: a name: `answered`,
#: a kind of failure, `withdrawn`, `cut`, or `unknown`; -1: under way. `retry_ns`: from when on the sequence might be
#: sent again after it. `running`, `limit`: what the server had with it, and might have. `before`, `total`: output
#: tokens of the sequence before it, and with what it brought. Of one that was under way where the log begins, `limit`
#: is -1.
ATTEMPTS = Schema(
    "attempts",
    (
        "row",
        "attempt",
        "replica",
        "sent_ns",
        "first_ns",
        "ended_ns",
        "end",
        "status",
        "retry_ns",
        "is_hedge",
        "cached_tokens",
        "running",
        "limit",
        "before",
        "total",
    ),
)
#: One row for each drain. `s`: its last fact; `next_s`: the first event after its decisions. `waiting`: sequences.
DRAINS = Schema("drains", ("s", "next_s", "ts", "waiting", "live"))
#: A replica after a drain (a row of `drains`), wherever anything differs from the row before. `waiting`: sequences in
#: its queue and in that of all replicas. `held`: blocks in tables of residents; `cached`: in no table, but hittable;
#: of other servers neither is known, nor who is `partial`.
#: `oldest_ns`: the arrival of the oldest that waits. `head_*`: the most urgent one that waits; `head_cause` is a
#: position in WAIT_CAUSES, or UNSEEN_CAUSE, `head_lacking` how many blocks it lacks.
GAUGES = Schema(
    "gauges",
    (
        "drain",
        "replica",
        "waiting",
        "running",
        "partial",
        "free",
        "held",
        "cached",
        "in_flight",
        "oldest_ns",
        "head_cause",
        "head_request",
        "head_index",
        "head_lacking",
    ),
)
#: Points of the run. `kind`: a MarkKind. `text`: a name. `by_*`: the sequence that a preemption was for. `rank`: which
#: of several was lost. `replicaset`: whose plug-in failed. `down_ns`: for how long there was no engine before it.
MARKS = Schema(
    "marks",
    (
        "s",
        "ts",
        "kind",
        "replica",
        "request",
        "index",
        "text",
        "by_request",
        "by_index",
        "rank",
        "replicaset",
        "down_ns",
    ),
)

SCHEMAS = (REQUESTS, PHASES, STRETCHES, STEPS, STAGES, LOADS, ATTEMPTS, DRAINS, GAUGES, MARKS)


class GrowingTable:
    """A table that is being made. `columns` are arrays that may be read and changed in place."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.columns: dict[str, array[int]] = {name: array("q") for name in schema.columns}
        self._appends = [column.append for column in self.columns.values()]

    def __len__(self) -> int:
        return len(self.columns[self.schema.columns[0]])

    def add(self, *values: int) -> int:
        """Append a row in the order of the schema; returns its number."""
        for append, value in zip(self._appends, values, strict=True):
            append(value)
        return len(self) - 1

    def finished(self) -> Table:
        """A copy as it is now."""
        return Table(self.schema, {name: np.array(column, np.int64) for name, column in self.columns.items()})


class Table:
    """A finished table; `table["ts"]` is a column."""

    def __init__(self, schema: Schema, columns: dict[str, Column]) -> None:
        self.schema = schema
        self._columns = columns

    def __len__(self) -> int:
        return len(self[self.schema.columns[0]])

    def __getitem__(self, column: str) -> Column:
        return self._columns[column]

    def row(self, number: int) -> dict[str, int]:
        """A row by column names."""
        return {name: int(self[name][number]) for name in self.schema.columns}

    def rows(self, selected: NDArray[np.bool_] | NDArray[np.int64] | slice = slice(None)) -> Iterator[dict[str, int]]:
        """The selected rows, in order."""
        names = self.schema.columns
        for values in zip(*(self[name][selected].tolist() for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


class NameTable:
    """Texts by position."""

    def __init__(self, names: list[str] | None = None) -> None:
        self.names: list[str] = list(names or [])
        self._positions = {name: position for position, name in enumerate(self.names)}

    def position(self, name: str) -> int:
        """The position of a text, new or known."""
        found = self._positions.get(name)
        if found is None:
            found = self._positions[name] = len(self.names)
            self.names.append(name)
        return found
