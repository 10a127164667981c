"""What the rounds of the benchmark beside peers come to: medians, tables, and ratios to the best peer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

OURS = "eventlm"


class Measurement(NamedTuple):
    """One load on one server in one round. `wrong` says what makes its figures not count; empty if nothing does."""

    model: str
    precision: str
    server: str
    num_clients: int
    round: int
    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    wrong: str = ""


class Column(NamedTuple):
    """A figure of a measurement, and how a table shows it."""

    field: str
    title: str
    format: str


COLUMNS = (
    Column("tokens_per_second", "output tok/s", "8.1f"),
    Column("ttft_p50_ms", "TTFT p50 ms", "8.0f"),
    Column("ttft_p99_ms", "TTFT p99 ms", "8.0f"),
    Column("tpot_p50_ms", "TPOT p50 ms", "8.1f"),
)
MIN_WIDTH = 8
#: Of a column's title and the space before it.
TITLE_WIDTH = 2 + max(len(column.title) for column in COLUMNS)
#: Least ratio of eventlm's output tokens a second to the best peer's, by precision and clients.
TARGETS = {("bf16", 1): 1.15, ("bf16", 8): 1.15, ("bf16", 32): 1.05, ("int8", 8): 1.15}


def medians(measurements: Sequence[Measurement]) -> dict[tuple[str, int], dict[str, float]]:
    """Of each server and load: each column's median over the rounds. What went wrong does not count."""
    cells: dict[tuple[str, int], list[Measurement]] = {}
    for measurement in measurements:
        if not measurement.wrong:
            cells.setdefault((measurement.server, measurement.num_clients), []).append(measurement)
    return {
        index: {column.field: statistics.median(getattr(one, column.field) for one in found) for column in COLUMNS}
        for index, found in cells.items()
    }


def format_table(measurements: Sequence[Measurement]) -> str:
    """A row for each server, each column at each number of clients. All must be of one model and precision."""
    servers = list(dict.fromkeys(one.server for one in measurements))
    loads = sorted({one.num_clients for one in measurements})
    cells = medians(measurements)
    num_rounds = max(one.round for one in measurements)
    first = measurements[0]
    width = max(MIN_WIDTH, -(-TITLE_WIDTH // len(loads)))
    title = f"{first.model}, {first.precision}, median of {num_rounds} round{'s' * (num_rounds != 1)}"
    lines = [
        title,
        f"{'':<10}" + "".join(f"{column.title:>{width * len(loads)}}" for column in COLUMNS),
        f"{'clients':<10}" + "".join(f"{load:>{width}}" for load in loads) * len(COLUMNS),
    ]
    for server in servers:
        row = f"{server:<10}"
        for column in COLUMNS:
            for load in loads:
                cell = cells.get((server, load))
                row += f"{format(cell[column.field], column.format) if cell else 'failed':>{width}}"
        lines.append(row)
    return "\n".join(lines)


class Ratio(NamedTuple):
    """eventlm beside the best peer of a load. `target` is the smallest `ratio` that passes, the largest of a latency;
    None: nothing is asked.
    """

    num_clients: int
    peer: str
    column: Column
    ratio: float
    target: float | None

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.column is COLUMNS[0] else self.ratio <= self.target


def ratios(measurements: Sequence[Measurement]) -> list[Ratio]:
    """At each load, eventlm's figures over those of the peer that gives the most tokens a second."""
    cells = medians(measurements)
    found = []
    for load in sorted({one.num_clients for one in measurements}):
        peers = {server: cell for (server, clients), cell in cells.items() if clients == load and server != OURS}
        ours = cells.get((OURS, load))
        if ours is None or not peers:
            continue
        best = max(peers, key=lambda server: peers[server]["tokens_per_second"])
        target = TARGETS.get((measurements[0].precision, load))
        for index, column in enumerate(COLUMNS):
            asked = target if index == 0 or target is None else 1.0
            found.append(Ratio(load, best, column, ours[column.field] / peers[best][column.field], asked))
    return found


def format_ratios(found: Sequence[Ratio]) -> str:
    """A row for each load with its best peer, a column for each figure: the ratio, and what is asked of it."""
    lines = [f"{'eventlm / best peer':<24}" + "".join(f"{column.title:>22}" for column in COLUMNS)]
    for load in dict.fromkeys(ratio.num_clients for ratio in found):
        of_load = [ratio for ratio in found if ratio.num_clients == load]
        clients = f"{load} client{'s' * (load != 1)}, {of_load[0].peer}"
        lines.append(f"{clients:<24}" + "".join(f"{_with_verdict(ratio):>22}" for ratio in of_load))
    return "\n".join(lines)


def _with_verdict(ratio: Ratio) -> str:
    if ratio.is_met is None:
        return f"{ratio.ratio:.2f}"
    sign = ">=" if ratio.column is COLUMNS[0] else "<="
    return f"{ratio.ratio:.2f} {sign} {ratio.target:.2f} {'met' if ratio.is_met else 'MISSED'}"
