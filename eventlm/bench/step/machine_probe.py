"""What this machine's memory and its multipliers give, measured with torch in a process of its own:

    python -m eventlm.bench.step.machine_probe THREADS

prints a `Machine` as JSON. Takes two to ten seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from eventlm.errors import EventLMError
from eventlm.system.child_process import last_line

#: Larger than any processor's cache: 256 MiB in float32.
_SIDE = 8192
#: A product that is bound by the multipliers and takes some tens of milliseconds.
_PRODUCT_SIDE = 2048
_NUM_RUNS = 24
#: No run begins after so long, as on few threads, or on busy ones.
_LONGEST_S = 2.0
#: A small product predicts the time of a large one of bfloat16: a minute, if the processor has no instructions for it.
_TRIAL_SIDE = 256
#: So many, since threads that are late to wake make the first ones slow.
_NUM_TRIALS = 100
_LONGEST_PRODUCT_S = 1.0


class Machine(Struct, frozen=True, kw_only=True):
    """Bytes per second that a matrix is read with, and FLOPs per second of a large product of matrices."""

    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"reads {self.bytes_per_second / 1e9:.1f} GB/s, multiplies {self.flops_per_second / 1e12:.2f} TFLOP/s"


async def probe(num_threads: int) -> Machine:
    """Measure in a process of its own, so that this one does not load torch. Raises EventLMError if that fails. If the
    caller is cancelled, the process is ended.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "eventlm.bench.step.machine_probe",
        str(num_threads),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        # Ctrl-C is for this process.
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = last_line(errors.decode(errors="replace"), process.returncode)
        raise EventLMError(f"this machine's memory and multipliers could not be measured: {last}")
    return msgspec.json.decode(output, type=Machine)


def measure(num_threads: int) -> Machine:
    """The best of several runs of each, of the products the faster of float32 and bfloat16. Loads torch."""
    import torch

    torch.set_num_threads(num_threads)
    matrix, vector = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE)
    flat = matrix.view(-1)
    read_s = min(_best_s(lambda: matrix.mv(vector)), _best_s(lambda: torch.dot(flat, flat)))

    def product_s(dtype: torch.dtype, side: int, num_runs: int) -> float:
        factor = torch.ones(side, side, dtype=dtype)
        return _best_s(lambda: torch.mm(factor, factor), num_runs)

    dtypes = [torch.float32]
    growth = (_PRODUCT_SIDE / _TRIAL_SIDE) ** 3
    if product_s(torch.bfloat16, _TRIAL_SIDE, _NUM_TRIALS) * growth < _LONGEST_PRODUCT_S:
        dtypes.append(torch.bfloat16)
    fastest_s = min(product_s(dtype, _PRODUCT_SIDE, _NUM_RUNS) for dtype in dtypes)
    return Machine(
        bytes_per_second=matrix.nbytes / read_s,
        flops_per_second=2 * _PRODUCT_SIDE**3 / fastest_s,
    )


def _best_s(action: Callable[[], object], num_runs: int = _NUM_RUNS) -> float:
    best, spent = float("inf"), 0.0
    for _ in range(num_runs):
        start = time.perf_counter()
        action()
        run_s = time.perf_counter() - start
        best, spent = min(best, run_s), spent + run_s
        if spent > _LONGEST_S:
            break
    return best


if __name__ == "__main__":
    print(msgspec.json.encode(measure(int(sys.argv[1]))).decode())
