"""How long something takes on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

#: Of the device's time.
WARM_UP_SECONDS, MEASURED_SECONDS = 0.05, 0.15
LEAST_RUNS, MOST_RUNS = 5, 200
#: Larger than any device's L2, and so much that filling it takes longer than the host needs to launch what is timed.
FLUSH_BYTES = 1 << 30


def median_seconds(
    run: Callable[[], object], *, prepare: Callable[[], None] | None = None, measured_seconds: float = MEASURED_SECONDS
) -> float:
    """The median time of `run`. Before each run the L2 is filled with something else, and `prepare` is called."""
    if not torch.cuda.is_available():
        return _on_the_host(run, prepare)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def timed(num_runs: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_runs)]
        for start, end in events:
            if prepare is not None:
                prepare()
            flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    once = min(timed(LEAST_RUNS))
    timed(min(int(WARM_UP_SECONDS / once) + 1, MOST_RUNS))
    return statistics.median(timed(min(max(int(measured_seconds / once), LEAST_RUNS), MOST_RUNS)))


def _on_the_host(run: Callable[[], object], prepare: Callable[[], None] | None) -> float:
    if prepare is not None:
        prepare()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
