"""Loads a workload from a workload file or a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import xxhash
from msgspec import structs

from eventlm.bus.run_folder import TRACE_NAME
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.workload.file import read_workload
from eventlm.replay.workload.recorded_policies import simulation_note
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.unknown import draw_unknown
from eventlm.replay.workload.workload import Workload
from eventlm.types import OnProgress

_TRACE_BEGINS = b'{"t":"header"'
_BYTES_PER_READ = 1 << 20


class LoadedWorkload(NamedTuple):
    """A workload; of a recorded run also its model, notes on what a simulation does not repeat, and warnings of its
    log.
    """

    workload: Workload
    model_name: str = "simulated"
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def load_workload(
    path: Path | str, *, with_incidents: bool = False, strict: bool = False, on_progress: OnProgress | None = None
) -> LoadedWorkload:
    """Read a workload file, a trace or the folder of a run. Raises UsageError, and what LogReader raises.

    with_incidents: also what befell the recorded engine from outside; a workload file always has it. strict: a torn
    last line is an error.
    """
    if not is_trace(path):
        workload = read_workload(path)
        recorded = next(iter(workload.recorded.values()), None)
        return LoadedWorkload(workload, recorded.models[0] if recorded is not None else "simulated")
    run = read_run(path, strict=strict, on_progress=on_progress)
    workload = draw_unknown(run.workload, seed=0)
    if with_incidents:
        workload = structs.replace(workload, incidents=run.external_facts)
    notes = [*([] if with_incidents else map(simulation_note, run.policies)), _length_note(run.workload)]
    return LoadedWorkload(
        workload,
        run.header.core.models[0],
        tuple(note for note in notes if note),
        tuple(run.warnings),
    )


def _length_note(workload: Workload) -> str:
    unknown = sum(request.has_unknown_length for request in workload.requests)
    return (
        f"the run does not show the length of {counted(unknown, 'request')}: drawn from the others" if unknown else ""
    )


def workload_hash(path: Path | str) -> str:
    """16 hex digits over everything that `load_workload` reads. Raises UsageError if it cannot be read."""
    found = xxhash.xxh3_64()
    source = Path(path)
    files = sorted(source.glob(f"{Path(TRACE_NAME).stem}*.jsonl")) if source.is_dir() else [source]
    try:
        for each in files:
            with each.open("rb") as file:
                while content := file.read(_BYTES_PER_READ):
                    found.update(content)
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from error
    return found.hexdigest()


def is_trace(path: Path | str) -> bool:
    """Whether it is the folder of a run, or a file that begins as a trace does. Anything else is taken for a workload
    file. Raises UsageError if it cannot be read.
    """
    if Path(path).is_dir():
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(_TRACE_BEGINS)) == _TRACE_BEGINS
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from error
