"""What the rounds of the benchmark beside peers come to: medians, tables, and ratios to each peer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.peer.checkpoints import GGUF_PRECISIONS, Precision

OURS = "eventlm"


def avx2_title(precision: Precision) -> str:
    """What tables call a precision where the servers were held to AVX2."""
    return f"{precision}, AVX2"


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
#: Of the files that eventlm and llama.cpp both serve, by clients; also where neither has wider vectors than AVX2's.
GGUF_TARGETS = {1: 1.3, 8: 2.0, 32: 2.5}
AVX2_TARGETS = {1: 1.0, 8: 1.5, 32: 1.5}
#: Least ratio of eventlm's output tokens a second to each peer's, by precision and clients.
TARGETS: dict[str, dict[int, float]] = {
    "bf16": {1: 1.15, 8: 1.15, 32: 1.05},
    "int8": {8: 1.15},
    "int4": {1: 1.15, 8: 1.15, 32: 1.15},
    **dict.fromkeys(GGUF_PRECISIONS, GGUF_TARGETS),
    **{avx2_title(precision): AVX2_TARGETS for precision in GGUF_PRECISIONS},
}


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
        f"{'':<13}" + "".join(f"{column.title:>{width * len(loads)}}" for column in COLUMNS),
        f"{'clients':<13}" + "".join(f"{load:>{width}}" for load in loads) * len(COLUMNS),
    ]
    for server in servers:
        row = f"{server:<13}"
        for column in COLUMNS:
            for load in loads:
                cell = cells.get((server, load))
                row += f"{format(cell[column.field], column.format) if cell else 'failed':>{width}}"
        lines.append(row)
    return "\n".join(lines)


class Ratio(NamedTuple):
    """eventlm beside a peer under a load. `target` is the smallest `ratio` that passes, the largest of a latency; None:
    nothing is asked.
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
    """At each load, eventlm's figures over those of each peer."""
    cells = medians(measurements)
    targets = TARGETS.get(measurements[0].precision, {})
    found = []
    for load in sorted({one.num_clients for one in measurements}):
        peers = [server for server, clients in cells if clients == load and server != OURS]
        ours = cells.get((OURS, load))
        if ours is None:
            continue
        target = targets.get(load)
        for peer in peers:
            for index, column in enumerate(COLUMNS):
                asked = target if index == 0 or target is None else 1.0
                found.append(Ratio(load, peer, column, ours[column.field] / cells[peer, load][column.field], asked))
    return found


def format_ratios(found: Sequence[Ratio]) -> str:
    """A row for each load and peer, a column for each figure: the ratio, and what is asked of it."""
    lines = [f"{'eventlm / peer':<24}" + "".join(f"{column.title:>22}" for column in COLUMNS)]
    for load, peer in dict.fromkeys((ratio.num_clients, ratio.peer) for ratio in found):
        of_row = [ratio for ratio in found if (ratio.num_clients, ratio.peer) == (load, peer)]
        clients = f"{load} client{'s' * (load != 1)}, {peer}"
        lines.append(f"{clients:<24}" + "".join(f"{_with_verdict(ratio):>22}" for ratio in of_row))
    return "\n".join(lines)


def _with_verdict(ratio: Ratio) -> str:
    if ratio.is_met is None:
        return f"{ratio.ratio:.2f}"
    sign = ">=" if ratio.column is COLUMNS[0] else "<="
    return f"{ratio.ratio:.2f} {sign} {ratio.target:.2f} {'met' if ratio.is_met else 'MISSED'}"
