"""Exports a trace as tables for notebooks and databases: requests (one row a sequence), steps, and where replicas are
other servers attempts.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import UsageError
from eventlm.events import (
    Arrived,
    BackendUp,
    Event,
    Finished,
    Header,
    Launched,
    Rejected,
    Snapshot,
    StepCompleted,
)
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.backend_names import names_at_start
from eventlm.system.whole_file import WholeFile, cannot_write
from eventlm.telemetry.attempts import ForwardedPhases, TracedAttempt
from eventlm.types import OnProgress, TimeWindow

Format = Literal["csv", "parquet"]
Value = int | str | None
#: Rows that are written together.
BATCH_ROWS = 16 * 1024

#: `outcome`: finished, rejected, or unfinished if the log does not contain the end. `request`: the seq of the arrival.
#: For the times see `eventlm.metrics.aggregates`.
REQUEST_COLUMNS = (
    *("request", "index", "outcome", "reason", "model", "kind", "n", "priority", "service_class", "session", "parent"),
    *("replica", "arrived_ns", "finished_ns", "deadline_ns", "slo_ttft_ns", "slo_tpot_ns"),
    *("prompt_tokens", "max_tokens", "output_tokens", "cached_tokens"),
    *("ttft_ns", "time_per_output_token_ns", "e2e_ns", "scheduling_delay_ns", "execution_ns", "preemption_ns"),
    *("prefill_ns", "decode_ns", "num_preemptions", "num_restarts"),
)
STEP_COLUMNS = (
    *("replica", "epoch", "step", "launch", "launched_ns", "start_ns", "end_ns", "completed_ns", "execution_ns"),
    *("predicted_ns", "idle_before_ns", "num_decodes", "num_chunks", "batch_tokens", "prompt_tokens", "output_tokens"),
)
#: `output_tokens`: that it brought. `end`: answered, a kind of failure, withdrawn, or cut.
ATTEMPT_COLUMNS = (
    *("request", "index", "attempt", "replica", "backend", "is_hedge", "sent_ns", "first_ns", "ended_ns", "end"),
    *("status", "retry_after_ns", "cached_tokens", "output_tokens", "running", "limit"),
)
#: All other columns are integers.
TEXT_COLUMNS = frozenset({"outcome", "reason", "model", "kind", "service_class", "backend", "end"})
#: Columns of requests, and the fields of a metrics row that they come from.
_MEASURED = {name: name for name in ("index", "reason", "replica", "finished_ns", "output_tokens", "cached_tokens")} | {
    "ttft_ns": "prefill_e2e_time",
    "time_per_output_token_ns": "request_time_per_output_token",
    "e2e_ns": "request_e2e_time",
    "scheduling_delay_ns": "request_scheduling_delay",
    "execution_ns": "request_execution_time",
    "preemption_ns": "request_preemption_time",
    "prefill_ns": "request_prefill_time",
    "decode_ns": "request_decode_time",
    "num_preemptions": "request_num_preemptions",
    "num_restarts": "request_num_restarts",
}


class Exported(NamedTuple):
    """A written file and its number of rows."""

    path: str
    num_rows: int


class CsvWriter:
    """None is an empty cell."""

    def __init__(self, file: IO[bytes], columns: Sequence[str]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        self._csv = csv.writer(self._text, lineterminator="\n")
        self._csv.writerow(columns)

    def write(self, rows: list[tuple[Value, ...]]) -> None:
        """Append rows."""
        self._csv.writerows(rows)

    def close(self) -> None:
        """Flush what is buffered."""
        self._text.flush()


class ParquetWriter:
    """Integers are int64 and may be null."""

    def __init__(self, file: IO[bytes], columns: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._pyarrow = pyarrow
        self._schema = pyarrow.schema(
            [(name, pyarrow.string() if name in TEXT_COLUMNS else pyarrow.int64()) for name in columns]
        )
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: list[tuple[Value, ...]]) -> None:
        """Append rows."""
        columns = zip(zip(*rows, strict=True), self._schema.types, strict=True)
        arrays = [self._pyarrow.array(values, type=kind) for values, kind in columns]
        self._writer.write_table(self._pyarrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class _Table:
    """A file with a header and rows, which gets its name once it is whole."""

    def __init__(self, path: Path, columns: Sequence[str], to: Format) -> None:
        self._num_rows = 0
        self._columns = columns
        self._rows: list[tuple[Value, ...]] = []
        self._whole = WholeFile(path)
        self._writer = (ParquetWriter if to == "parquet" else CsvWriter)(self._whole.file, columns)

    def add(self, values: dict[str, Value]) -> None:
        """Append a row; missing columns are null."""
        self._rows.append(tuple(map(values.get, self._columns)))
        self._num_rows += 1
        if len(self._rows) == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write(self._rows)
        self._rows = []

    def finish(self) -> Exported:
        """Write the rest and rename the file."""
        self._flush()
        self._writer.close()
        self._whole.finish()
        return Exported(str(self._whole.path), self._num_rows)

    def discard(self) -> None:
        """Remove the file if it is not finished."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
        self._whole.discard()


class _Exporter:
    """The sink of a metrics store: its rows with further fields of the events."""

    def __init__(self, requests: _Table, steps: _Table, window: TimeWindow | None) -> None:
        self._window = window
        self._requests = requests
        self._steps = steps
        self._store = MetricsStore(sink=self)
        #: Live requests, and the indices of their unfinished sequences.
        self._arrivals: dict[int, Arrived] = {}
        self._unended: dict[int, set[int]] = {}
        self._launches: dict[int, Launched] = {}
        #: The latest completion of each replica, with its launch.
        self._completed: dict[int, tuple[Launched, StepCompleted]] = {}

    def apply(self, event: Event) -> None:
        """The next event of the log."""
        match event:
            case Arrived():
                self._arrivals[event.s] = event
                self._unended[event.s] = set(range(event.n))
            case Rejected() if event.request in self._arrivals:
                self._add_without_row(event.request, "rejected", event.reason)
            case Launched():
                self._launches[event.s] = event
            case StepCompleted() if event.c in self._launches:
                self._completed[event.replica] = (self._launches.pop(event.c), event)
        self._store.apply(event)

    def finish(self) -> None:
        """After the last event: add the unfinished ones."""
        for request in list(self._arrivals):
            self._add_without_row(request, "unfinished", None)

    def _add_without_row(self, request: int, outcome: str, reason: str | None) -> None:
        arrival = self._arrivals.pop(request)
        indices = sorted(self._unended.pop(request))
        for index in indices if self._is_wanted(arrival) else []:
            self._requests.add(_of_arrival(arrival) | {"index": index, "outcome": outcome, "reason": reason})

    def _is_wanted(self, arrival: Arrived) -> bool:
        return self._window is None or self._window.has(arrival.ts)

    def request_ended(self, row: RequestRow) -> None:
        """A sequence has ended."""
        arrival = self._arrivals[row.request]
        self._unended[row.request].discard(row.index)
        if not self._unended[row.request]:
            del self._unended[row.request], self._arrivals[row.request]
        if self._is_wanted(arrival):
            measured: dict[str, Value] = {column: getattr(row, field) for column, field in _MEASURED.items()}
            self._requests.add(_of_arrival(arrival) | measured | {"outcome": "finished"})

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """There is no table of tokens."""

    def step_completed(self, row: StepRow) -> None:
        """A step has completed."""
        launched, done = self._completed.pop(row.replica)
        if self._window is not None and not self._window.overlaps(row.started_ns, row.completed_ns):
            return
        self._steps.add(
            {
                "replica": row.replica,
                "epoch": launched.epoch,
                "step": row.step,
                "launch": launched.s,
                "launched_ns": launched.ts,
                "start_ns": done.start_ns,
                "end_ns": done.end_ns,
                "completed_ns": row.completed_ns,
                "execution_ns": row.batch_execution_time,
                "predicted_ns": row.predicted_ns,
                "idle_before_ns": row.inter_batch_delay,
                "num_decodes": len(launched.decodes),
                "num_chunks": len(launched.chunks),
                "batch_tokens": row.batch_num_tokens,
                "prompt_tokens": sum(chunk[3] for chunk in launched.chunks),
                "output_tokens": sum(done.produced),
            }
        )


_OF_ATTEMPT = (
    *("request", "index", "replica", "sent_ns", "ended_ns", "end", "status", "retry_after_ns"),
    *("cached_tokens", "running", "limit"),
)


class _Attempts:
    """Fills the table of attempts at other servers."""

    def __init__(self, table: _Table, header: Header, window: TimeWindow | None) -> None:
        self._table = table
        self._window = window
        self._names = names_at_start(header)
        self._first_s = header.s
        self._forwards = ForwardedPhases(lambda *_: None, self._add)
        self._now_ns = 0

    def apply(self, event: Event) -> None:
        """The next event of the log."""
        self._now_ns = event.ts
        if isinstance(event, BackendUp):
            self._names[event.replica] = event.name
        elif isinstance(event, Finished):
            self._forwards.finish(event)
        elif isinstance(event, Snapshot) and event.s == self._first_s + 1:
            self._forwards.take_up(msgspec.json.decode(event.state, type=StateSnapshot))
        elif (handler := self._forwards.handlers.get(type(event))) is not None:
            handler(event)

    def finish(self) -> None:
        """After the last event."""
        self._forwards.end(self._now_ns)

    def _add(self, attempt: TracedAttempt) -> None:
        if self._window is not None and not self._window.overlaps(attempt.sent_ns, attempt.ended_ns):
            return
        self._table.add(
            {name: getattr(attempt, name) for name in _OF_ATTEMPT}
            | {
                "attempt": attempt.number,
                "backend": self._names.get(attempt.replica),
                "is_hedge": int(attempt.is_hedge),
                "first_ns": attempt.first_ns if attempt.first_ns >= 0 else None,
                "output_tokens": attempt.total - attempt.before,
            }
        )


def _of_arrival(arrival: Arrived) -> dict[str, Value]:
    """Columns of a request that do not depend on how it was served. Optional ones are null instead of 0."""
    scheduling = arrival.scheduling
    found: dict[str, Value] = {
        "request": arrival.s,
        "n": arrival.n,
        "arrived_ns": arrival.ts,
        "prompt_tokens": arrival.prompt_tokens,
        "max_tokens": arrival.max_tokens,
    }
    found |= {name: getattr(scheduling, name) for name in ("model", "kind", "priority", "service_class")}
    optional = ("session", "parent", "deadline_ns", "slo_ttft_ns", "slo_tpot_ns")
    return found | {name: getattr(scheduling, name) or None for name in optional}


_COLUMNS = {"requests": REQUEST_COLUMNS, "steps": STEP_COLUMNS, "attempts": ATTEMPT_COLUMNS}


@contextlib.contextmanager
def _tables(folder: Path, to: Format, names: Sequence[str]) -> Iterator[list[_Table]]:
    tables: list[_Table] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            tables.append(_Table(folder / f"{name}.{to}", _COLUMNS[name], to))
        yield tables
    except OSError as error:
        raise cannot_write(folder, error, "folder") from error
    finally:
        for table in tables:
            table.discard()


def export(
    path: Path | str,
    folder: Path | str,
    *,
    to: Format,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> tuple[list[Exported], list[str]]:
    """Write requests, steps and attempts of a trace, or of a window of it, to a folder; the files, and the trace's
    warnings. Attempts only where there are other servers.

    Existing files are replaced once the new ones are whole. Raises UsageError if they cannot be written or pyarrow is
    missing, else as LogReader does.
    """
    if to == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise UsageError(
                "parquet files need pyarrow, which is not installed: `pip install 'eventlm[parquet]'`, "
                "or use --format csv"
            ) from error
    with LogReader(path, strict=strict) as reader:
        has_servers = any(each.core.forwards for each in reader.header.sets)
        names = ["requests", "steps", "attempts"] if has_servers else ["requests", "steps"]
        with _tables(Path(folder), to, names) as tables:
            exporter = _Exporter(tables[0], tables[1], window)
            attempts = _Attempts(tables[2], reader.header, window) if has_servers else None

            def apply(event: Event) -> None:
                exporter.apply(event)
                if attempts is not None:
                    attempts.apply(event)

            reader.fold(apply, on_progress=on_progress)
            exporter.finish()
            if attempts is not None:
                attempts.finish()
            return [table.finish() for table in tables], reader.warnings()
