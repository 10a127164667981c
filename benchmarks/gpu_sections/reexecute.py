"""Whether what the GPU computed comes out again: recorded runs executed anew, and a control that must differ."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_sections.checkpoints import qwen
from benchmarks.gpu_sections.engines import Workload, generate, nano_workload, start
from benchmarks.gpu_sections.row import Context, Parts, Row, check, speed
from eventlm.bus.log_reader import LogReader
from eventlm.compose.device import devices_of_run
from eventlm.replay.execute import ExecuteResult, execute
from eventlm.replay.execution_workers import WorkerProcesses

MOST_TOKENS = 1_000_000
#: Of the section's time, for what comes behind the first round; the rest is for starts that take longer.
SHARE = 0.7
#: Of a control each row is a step of its own.
CONTROL_SEQS, CONTROL_TOKENS = 16, 64


class Round(NamedTuple):
    """A run that was recorded and executed again."""

    num_tokens: int
    record_seconds: float
    execute_seconds: float
    result: ExecuteResult


def parts(context: Context) -> Parts:
    """The control needs none of the rest."""
    return {"re-execution": lambda: _measure(context), "control": lambda: _control(context)}


def _measure(context: Context) -> Iterator[Row]:
    """One round of the whole workload, and a second one with as many as there is time for."""
    began = time.monotonic()
    rounds = [_round(context, num_workloads=1)]
    took = time.monotonic() - began
    times = int((SHARE * context.seconds - took) / took)
    most = MOST_TOKENS // rounds[0].num_tokens
    if times > 0 and not context.smoke:
        rounds.append(_round(context, num_workloads=min(times, most)))
    results = [each.result for each in rounds]
    same = sum(result.num_tokens for result in results)
    differ = sum(len(result.mismatches) for result in results) + sum(result.exit_code != 0 for result in results)
    note = f"{same:,} tokens the same"
    yield check("tokens that differ when executed again", differ, "", at_most=0, note=note)
    execute_seconds = sum(each.execute_seconds for each in rounds)
    record_seconds = sum(each.record_seconds for each in rounds)
    num_tokens = sum(each.num_tokens for each in rounds)
    yield speed(
        "re-execution",
        num_tokens / execute_seconds,
        "tok/s",
        limit=num_tokens / record_seconds,
        limit_name="recorded",
        note="with the worker's start",
    )


def _round(context: Context, *, num_workloads: int) -> Round:
    """num_workloads: how often the whole workload is given, each time with other prompts."""
    model, whole = qwen(context, "0.6B"), nano_workload(context)
    with start(context, model, record=Path(context.folder) / "runs", record_tokens=True, record_keep="1TiB") as llm:
        runs = [
            generate(llm, Workload([[number, *prompt] for prompt in whole.prompts], whole.output_lens))
            for number in range(num_workloads)
        ]
        folder = llm.run_folder
    assert folder is not None
    began = time.monotonic()
    result = execute(folder, model=str(model), make_workers=_workers(folder))
    seconds = sum(run.seconds for run in runs)
    return Round(sum(run.num_tokens for run in runs), seconds, time.monotonic() - began, result)


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
    result = execute(folder, model=str(model), make_workers=_workers(folder), teacher_force=True, rows_alone=True)
    differ = len(result.mismatches)
    note = f"{result.num_tokens:,} tokens the same"
    # So few tokens of a tiny model may well come out the same.
    least = 0 if context.smoke else 1
    yield check("control: tokens that differ, each row alone", differ, "", at_least=least, note=note)
