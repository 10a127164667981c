"""Arrivals and lengths from a trace of real load: a CSV file with a header line, JSON lines, or a workload file.

A format is told by its columns. eventlm's own has `arrival_s` (seconds, from any origin), `prompt_tokens` and
`output_tokens`; others join by a row in `FORMATS`. `eventlm trace import` makes workload files of public traces.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from eventlm.bench.text_file import read_text_file
from eventlm.errors import UsageError


class TraceFormat(NamedTuple):
    """Where a format has what is needed. `seconds` reads its times, from any origin."""

    name: str
    arrival: str
    prompt_tokens: str
    output_tokens: str
    seconds: Callable[[Any], float] = float


FORMATS = (TraceFormat("eventlm", "arrival_s", "prompt_tokens", "output_tokens"),)


class Arrival(NamedTuple):
    """A request of a trace; `arrival_s` counts from the first one's."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_arrivals(path: str) -> list[Arrival]:
    """A trace's requests in the order of their arrival, at least one. Raises UsageError that says where it is wrong."""
    text = read_text_file("--trace", path)
    arrivals = [_arrival(f"--trace {path}:{number}", row) for number, row in _rows(path, text)]
    if not arrivals:
        raise UsageError(f"--trace {path}: there is no request in this file")
    arrivals.sort()
    first_s = arrivals[0].arrival_s
    return [arrival._replace(arrival_s=arrival.arrival_s - first_s) for arrival in arrivals]


def _rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows by column, with their lines' numbers."""
    if not text.lstrip().startswith("{"):
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        yield from ((reader.line_num, row) for row in reader)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise UsageError(f"--trace {path}:{number}: {error}") from error
            # A workload file says first what it is; blocks and sessions mean nothing to a server.
            if row.get("t") != "workload":
                yield number, row


def _arrival(where: str, row: Mapping[str, Any]) -> Arrival:
    for known in FORMATS:
        columns = (known.arrival, known.prompt_tokens, known.output_tokens)
        if not all(column in row for column in columns):
            continue
        arrival, prompt_tokens, output_tokens = (row[column] for column in columns)
        try:
            found = Arrival(known.seconds(arrival), int(prompt_tokens), int(output_tokens))
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{column}={row[column]!r}" for column in columns)
            raise UsageError(f"{where}: expected numbers, got {given}") from error
        if not math.isfinite(found.arrival_s) or found.prompt_tokens < 1 or found.output_tokens < 1:
            raise UsageError(f"{where}: a time must be finite, and lengths at least 1 token")
        return found
    wanted = "; ".join(f"{known.arrival}, {known.prompt_tokens}, {known.output_tokens}" for known in FORMATS)
    shown = ", ".join(str(column) for column in row)
    raise UsageError(f"{where}: the columns are {shown}, but needed are {wanted}")
