"""What `benchmarks/gpu.py` measures: a module a section, with `parts(context)`.

A part is independent of the others: its error, or its crash, is a row in the table and the next part goes on.
"""

from __future__ import annotations

from benchmarks.gpu_harness.section import Section

#: In the order in which they run: what others need first, then what says most.
SECTIONS = (
    Section("ceilings", 15, needs_ceilings=False),
    Section("kernels", 110, part_seconds=90),
    Section("correct", 45, part_seconds=90, needs_ceilings=False),
    Section("models", 35, part_seconds=60, needs_ceilings=False),
    Section("nano", 50),
    Section("nano8b", 60),
    Section("gaps", 30, needs_ceilings=False),
    Section("recording", 45, needs_ceilings=False),
    Section("http", 30, needs_ceilings=False),
    Section("reexecute", 130, needs_ceilings=False),
    Section("batch_invariant", 35, needs_ceilings=False),
    Section("fp8", 35, needs_ceilings=False),
    Section("memory", 25, needs_ceilings=False),
    Section("torch_compile", 60, needs_ceilings=False),
    Section("sanitizer", 40, needs_ceilings=False),
)
