"""nano-vLLM's workload on the shape of Qwen3-8B through the offline API, recorded, beside its roofline."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_harness.engines import nano_workload
from benchmarks.gpu_harness.row import Context, Parts, Row
from benchmarks.gpu_sections.nano import offline

TARGET = 0.8
#: Of the 256: a step takes several times as long as the smaller model's.
NUM_SEQS = 128


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"Qwen3-8B": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    row, _ = offline(context, "8B", [nano_workload(context).first(NUM_SEQS)], target=TARGET)
    yield row
