"""A run as a workload file: its requests and what befell its engine from outside, for simulations."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.replay.kept_input import check_keeps_input
from eventlm.replay.shrink.parts import keep_requests
from eventlm.replay.workload.file import save_workload
from eventlm.replay.workload.source import load_workload
from eventlm.types import OnProgress, TimeWindow


class ExportedWorkload(NamedTuple):
    """What was written, notes on what the run does not show, and warnings of its log."""

    num_requests: int
    num_incidents: int
    notes: list[str]
    warnings: list[str]


def export_workload(
    path: Path | str,
    output: Path | str,
    *,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportedWorkload:
    """Write the requests of a trace, or those that arrived in a window, and all incidents.

    Raises UsageError if the file cannot be written, is the trace or would be empty, and what LogReader raises.
    """
    check_keeps_input(output, path)
    loaded = load_workload(path, with_incidents=True, strict=strict, on_progress=on_progress)
    workload = loaded.workload
    if window is not None:
        arrived = [index for index, each in enumerate(workload.requests) if window.has(each.arrival_ns)]
        workload = keep_requests(workload, arrived)
    if not workload.requests:
        where = "in the window" if window is not None else "in it"
        raise UsageError(f"{path}: no request arrived {where}, so there is no workload to write")
    save_workload(output, workload)
    return ExportedWorkload(len(workload.requests), len(workload.incidents), list(loaded.notes), list(loaded.warnings))
