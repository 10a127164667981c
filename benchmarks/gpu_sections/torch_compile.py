"""What torch.compile gains, and what it costs when a worker starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start, warm_up
from benchmarks.gpu_harness.row import Context, Parts, Row, Skip, cost, speed


class Found(NamedTuple):
    """Seconds until the engine is ready, and tokens a second of a large batch."""

    start_seconds: float
    rate: float


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"torch.compile": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    if context.smoke:
        raise Skip("kernels of the interpreter cannot be compiled around")
    plain, compiled = (_find(context, is_compiled) for is_compiled in (False, True))
    yield speed("throughput with torch.compile", compiled.rate, "tok/s", limit=plain.rate, limit_name="without")
    yield cost("start with torch.compile", compiled.start_seconds, "s", note=f"without {plain.start_seconds:.1f} s")


def _find(context: Context, is_compiled: bool) -> Found:
    model = qwen(context, "0.6B")
    workload = even_workload(context, num_seqs=64, prompt_len=128, output_len=256)
    began = time.monotonic()
    with start(context, model, torch_compile=is_compiled) as llm:
        start_seconds = time.monotonic() - began
        warm_up(llm, workload)
        return Found(start_seconds, generate(llm, workload).rate)
