"""What the device's memory and multipliers give, and how fast the host runs Python: what all else is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu_harness.row import CEILINGS_FILE, Ceilings, Context, Parts, Row, speed
from benchmarks.gpu_harness.timing import median_seconds

PYTHON_STEPS = 1_000_000


def parts(context: Context) -> Parts:
    """All in one: each of them is needed."""
    return {"ceilings": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    side, num_bytes = (128, 1 << 20) if context.smoke else (8192, 4 << 30)
    bandwidth = _copy_bytes_per_second(context.device, num_bytes)
    product_rate = _product_flops_per_second(context.device, side)
    found = Ceilings(
        device="the CPU" if context.smoke else torch.cuda.get_device_name(),
        bytes_per_second=bandwidth,
        flops_per_second=product_rate,
        python_steps_per_second=_python_steps_per_second(),
    )
    (Path(context.folder) / CEILINGS_FILE).write_bytes(msgspec.json.encode(found))
    yield speed("copy, read and written", found.bytes_per_second / 1e12, "TB/s", note=found.device)
    yield speed(f"bf16 product of {side}^3, random data", found.flops_per_second / 1e12, "TFLOP/s")
    yield speed("empty Python loop", found.python_steps_per_second / 1e6, "M steps/s")


def _copy_bytes_per_second(device: str, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source))


def _product_flops_per_second(device: str, side: int) -> float:
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product: Callable[[], Tensor] = lambda: torch.mm(a, b, out=out)  # noqa: E731
    return 2 * side**3 / median_seconds(product)


def _python_steps_per_second() -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(PYTHON_STEPS):
            pass
        times.append(time.perf_counter() - start)
    return PYTHON_STEPS / statistics.median(times)
