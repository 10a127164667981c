"""Whether what the GPU computed comes out again: recorded runs executed anew, and a control that must differ."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import Run, Workload, generate, nano_workload, start
from benchmarks.gpu_harness.row import Context, Parts, Row, check, speed
from benchmarks.rows_alone import RowsAlone
from eventlm.bootstrap.device import devices_of_run
from eventlm.bus.log_reader import LogReader
from eventlm.replay.execute.execution import execute
from eventlm.replay.execute.workers import WorkerProcesses

WANTED_TOKENS = 1_000_000
#: Of the section's time, for the run and its execution; the rest is for the control, and for starts that take longer.
SHARE = 0.7
#: Of a control each row is a step of its own.
CONTROL_SEQS, CONTROL_TOKENS = 16, 64


class Recorded(NamedTuple):
    """A run, how many tokens it generated, and how long that took."""

    folder: Path
    num_tokens: int
    seconds: float


def parts(context: Context) -> Parts:
    """The control needs none of the rest."""
    return {"re-execution": lambda: _measure(context), "control": lambda: _control(context)}


def _measure(context: Context) -> Iterator[Row]:
    recorded = _record(context)
    began = time.monotonic()
    result = execute(recorded.folder, model=str(qwen(context, "0.6B")), make_workers=_workers(recorded.folder))
    execute_seconds = time.monotonic() - began
    differ = len(result.mismatches) + (result.exit_code != 0)
    note = f"{result.num_tokens:,} tokens the same"
    yield check("tokens that differ when executed again", differ, "", at_most=0, note=note)
    yield speed(
        "re-execution",
        recorded.num_tokens / execute_seconds,
        "tok/s",
        limit=recorded.num_tokens / recorded.seconds,
        limit_name="recorded",
        note="with the worker's start",
    )


def _record(context: Context) -> Recorded:
    """The whole workload again and again, each time with other prompts, until there are as many tokens as wanted or
    another round could not be executed again in time; once in a smoke run.
    """
    model, whole = qwen(context, "0.6B"), nano_workload(context)
    began = time.monotonic()
    runs: list[Run] = []
    with start(context, model, record=Path(context.folder) / "runs", record_tokens=True, record_keep="1TiB") as llm:
        while not runs or sum(run.num_tokens for run in runs) < WANTED_TOKENS:
            prompts = [[len(runs), *prompt] for prompt in whole.prompts]
            runs.append(generate(llm, Workload(prompts, whole.output_lens)))
            # The execution starts a worker, too, and computes what has been computed.
            is_late = 2 * (time.monotonic() - began + runs[-1].seconds) > SHARE * context.seconds
            if is_late or context.smoke:
                break
        folder = llm.run_folder
    assert folder is not None
    return Recorded(folder, sum(run.num_tokens for run in runs), sum(run.seconds for run in runs))


def _workers(run_folder: Path) -> functools.partial[WorkerProcesses]:
    """On the GPU that the run was computed on."""
    with LogReader(run_folder) as log:
        return functools.partial(WorkerProcesses, devices=devices_of_run(log.header))


def _control(context: Context) -> Iterator[Row]:
    """In bfloat16 a token's logits depend on the batch that it is in, so among many some must come out otherwise when
    each row is a step alone; if none does, nothing is compared.
    """
    model, whole = qwen(context, "0.6B"), nano_workload(context).first(CONTROL_SEQS)
    workload = Workload(whole.prompts, [min(length, CONTROL_TOKENS) for length in whole.output_lens])
    with start(context, model, record=Path(context.folder) / "runs", record_tokens=True) as llm:
        generate(llm, workload)
        folder = llm.run_folder
    assert folder is not None
    make_workers = _workers(folder)
    result = execute(
        folder,
        model=str(model),
        make_workers=lambda setup, header: RowsAlone(make_workers(setup, header)),
        teacher_force=True,
    )
    differ = len(result.mismatches)
    note = f"{result.num_tokens:,} tokens the same"
    # So few tokens of a tiny model may well come out the same.
    least = 0 if context.smoke else 1
    yield check("control: tokens that differ, each row alone", differ, "", at_least=least, note=note)
