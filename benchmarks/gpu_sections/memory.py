"""Whether an engine takes the share of the GPU's memory that it is given, and says so where that is too little."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start
from benchmarks.gpu_harness.row import Context, Parts, Row, SectionError, Skip, check, cost
from eventlm.errors import EventLMError

SHARES = (0.5, 0.9)
#: Of the GPU's memory: what may be taken beyond the share, or left of it.
MARGIN = 0.02
#: Less than the weights.
TOO_LITTLE = 0.005


def parts(context: Context) -> Parts:
    """Each with an engine of its own."""
    used = {f"share {share}": lambda share=share: _used(context, share) for share in SHARES}
    return used | {"too little": lambda: _too_little(context)}


def _used(context: Context, share: float) -> Iterator[Row]:
    if context.smoke:
        raise Skip("the interpreter has no memory of its own")
    workload = even_workload(context, num_seqs=256, prompt_len=1024, output_len=32)
    free_before, total = torch.cuda.mem_get_info()
    with start(context, qwen(context, "0.6B"), gpu_memory_utilization=share) as llm:
        generate(llm, workload)
        free, _ = torch.cuda.mem_get_info()
    used = (free_before - free) / total
    note = f"{(free_before - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    yield cost(f"memory taken with utilization {share}", used, "of all", at_most=share + MARGIN, note=note)
    if used < share - MARGIN:
        raise SectionError(f"{share - used:.1%} of the GPU's memory is left unused of utilization {share}")


def _too_little(context: Context) -> Iterator[Row]:
    """It must be an error that names the option, and come before the engine is given work."""
    options = {"num_blocks": 2} if context.smoke else {"gpu_memory_utilization": TOO_LITTLE}
    try:
        start(context, qwen(context, "0.6B"), **options).shutdown()
    except EventLMError as error:
        message = str(error)
        yield check(
            "too little memory: its error names the option",
            float(next(iter(options)) in message),
            "",
            at_least=1,
            note=message,
        )
    else:
        raise SectionError("too little memory was no error")
