"""A trace as two tables, for notebooks and databases: requests (one row a sequence) and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Arrived, Event, Launched, Rejected, StepCompleted
from eventlm.metrics.rows import RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.table_file import Exported, Format, TableFile, Value, require_pyarrow
from eventlm.types import OnProgress, TimeWindow

#: Columns and their types. `outcome`: finished, rejected, or unfinished where the log does not show the end. `request`
#: is the seq of the arrival. For the times see `eventlm.metrics.aggregates`.
REQUEST_COLUMNS: dict[str, type] = {
    "request": int,
    "index": int,
    "outcome": str,
    "reason": str,
    "model": str,
    "kind": str,
    "n": int,
    "priority": int,
    "service_class": str,
    "session": int,
    "parent": int,
    "replica": int,
    "arrived_ns": int,
    "finished_ns": int,
    "deadline_ns": int,
    "slo_ttft_ns": int,
    "slo_tpot_ns": int,
    "prompt_tokens": int,
    "max_tokens": int,
    "output_tokens": int,
    "cached_tokens": int,
    "ttft_ns": int,
    "time_per_output_token_ns": int,
    "e2e_ns": int,
    "scheduling_delay_ns": int,
    "execution_ns": int,
    "preemption_ns": int,
    "prefill_ns": int,
    "decode_ns": int,
    "num_preemptions": int,
    "num_restarts": int,
}
STEP_COLUMNS: dict[str, type] = {
    "replica": int,
    "epoch": int,
    "step": int,
    "launch": int,
    "launched_ns": int,
    "start_ns": int,
    "end_ns": int,
    "completed_ns": int,
    "execution_ns": int,
    "predicted_ns": int,
    "idle_before_ns": int,
    "num_decodes": int,
    "num_chunks": int,
    "batch_tokens": int,
    "prompt_tokens": int,
    "output_tokens": int,
}


class _Exporter:
    """The metrics store's sink: its rows with what else the events say."""

    def __init__(self, requests: TableFile, steps: TableFile, window: TimeWindow | None) -> None:
        self._window = window
        self._requests = requests
        self._steps = steps
        self._store = MetricsStore(sink=self)
        #: Requests with the number of their sequences that have not ended.
        self._arrivals: dict[int, Arrived] = {}
        self._unended: dict[int, set[int]] = {}
        self._launches: dict[int, Launched] = {}
        self._completed: dict[int, tuple[Launched, StepCompleted]] = {}

    def see(self, event: Event) -> None:
        """The next event of the log."""
        match event:
            case Arrived():
                self._arrivals[event.s] = event
                self._unended[event.s] = set(range(event.n))
            case Rejected() if event.request in self._arrivals:
                self._leave_out(event.request, "rejected", event.reason)
            case Launched():
                self._launches[event.s] = event
            case StepCompleted() if event.c in self._launches:
                self._completed[event.replica] = (self._launches.pop(event.c), event)
        self._store.apply(event)

    def finish(self) -> None:
        """Behind the last event: those that have not ended."""
        for request in list(self._arrivals):
            self._leave_out(request, "unfinished", None)

    def _leave_out(self, request: int, outcome: str, reason: str | None) -> None:
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
        if not self._is_wanted(arrival):
            return
        measured: dict[str, Value] = {
            "index": row.index,
            "outcome": "finished",
            "reason": row.reason,
            "replica": row.replica,
            "finished_ns": row.finished_ns,
            "output_tokens": row.output_tokens,
            "cached_tokens": row.cached_tokens,
            "ttft_ns": row.prefill_e2e_time,
            "time_per_output_token_ns": row.request_time_per_output_token,
            "e2e_ns": row.request_e2e_time,
            "scheduling_delay_ns": row.request_scheduling_delay,
            "execution_ns": row.request_execution_time,
            "preemption_ns": row.request_preemption_time,
            "prefill_ns": row.request_prefill_time,
            "decode_ns": row.request_decode_time,
            "num_preemptions": row.request_num_preemptions,
            "num_restarts": row.request_num_restarts,
        }
        self._requests.add(_of_arrival(arrival) | measured)

    def step_completed(self, row: StepRow) -> None:
        """A step has completed; its completion is the latest of its replica."""
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


def _of_arrival(arrival: Arrived) -> dict[str, Value]:
    """What a request brought; 0 that means nothing is left empty."""
    return {
        "request": arrival.s,
        "model": arrival.scheduling.model,
        "kind": arrival.scheduling.kind,
        "n": arrival.n,
        "priority": arrival.scheduling.priority,
        "service_class": arrival.scheduling.service_class,
        "session": arrival.scheduling.session or None,
        "parent": arrival.scheduling.parent or None,
        "arrived_ns": arrival.ts,
        "deadline_ns": arrival.scheduling.deadline_ns or None,
        "slo_ttft_ns": arrival.scheduling.slo_ttft_ns or None,
        "slo_tpot_ns": arrival.scheduling.slo_tpot_ns or None,
        "prompt_tokens": arrival.prompt_tokens,
        "max_tokens": arrival.max_tokens,
    }


@contextlib.contextmanager
def _tables(folder: Path, to: Format) -> Iterator[tuple[TableFile, TableFile]]:
    tables: list[TableFile] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, columns in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
            tables.append(TableFile(folder / f"{name}.{to}", columns, to))
        yield tables[0], tables[1]
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with -o") from error
    finally:
        for table in tables:
            table.give_up()


def export(
    path: Path | str,
    folder: Path | str,
    *,
    to: Format,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> tuple[list[Exported], list[str]]:
    """Write requests and steps of a trace, or of a window of it, to a folder; the files, and the trace's warnings.

    Files that are there are replaced once the new ones are whole. Raises UsageError if they cannot be written, else as
    LogReader does.
    """
    if to == "parquet":
        require_pyarrow()
    with LogReader(path, strict=strict) as reader, _tables(Path(folder), to) as (requests, steps):
        exporter = _Exporter(requests, steps, window)
        reader.fold(exporter.see, on_progress=on_progress)
        exporter.finish()
        return [requests.finish(), steps.finish()], reader.warnings()
