"""What is between the steps: how long the GPU idles while 256 sequences decode, and what the core's work would cost if
it were not done while the step before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start, warm_up
from benchmarks.gpu_harness.roofline import Gaps, gaps, read_steps
from benchmarks.gpu_harness.row import Context, Parts, Row, cost, speed

BATCH = 256
MOST_IDLE = 0.03


def parts(context: Context) -> Parts:
    """Both runs as one row, the second beside the first."""
    return {"gaps": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    ahead, in_turns = (_gaps(context, in_flight) for in_flight in (2, 1))
    note = f"step {_us(ahead.duration)}, period {_us(ahead.period)}, {ahead.num_steps} steps"
    yield cost(f"GPU idle between decodes, batch {BATCH}", ahead.idle, "of time", at_most=MOST_IDLE, note=note)
    note = f"step {_us(in_turns.duration)}, period {_us(in_turns.period)}"
    yield cost("the same, one step in flight", in_turns.idle, "of time", note=note)
    yield speed(
        "decode steps",
        1 / ahead.period,
        "steps/s",
        limit=1 / in_turns.period,
        limit_name="one in flight",
        note=f"work of the engine hidden behind a step: {_us(in_turns.period - ahead.period)}",
    )


def _gaps(context: Context, in_flight: int) -> Gaps:
    workload = even_workload(context, num_seqs=BATCH, prompt_len=128, output_len=256)
    record = Path(context.folder) / "runs"
    with start(context, qwen(context, "0.6B"), record=record, max_steps_in_flight=in_flight, max_num_seqs=BATCH) as llm:
        num_before = warm_up(llm, workload)
        generate(llm, workload)
        run_folder = llm.run_folder
    assert run_folder is not None
    return gaps(
        read_steps(run_folder, num_before=num_before, num_requests=len(workload.prompts)),
        num_rows=len(workload.prompts),
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"
