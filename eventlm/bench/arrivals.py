"""When requests arrive in an open loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy

from eventlm.errors import UsageError

ArrivalProcess = Literal["poisson", "gamma", "constant"]


def arrival_times(
    process: ArrivalProcess, requests_per_second: float, *, burstiness: float, random: numpy.random.Generator
) -> Iterator[float]:
    """Seconds after the start, without an end; the first is one interval after it.

    Intervals are exponential (`poisson`), gamma distributed with shape `burstiness` (`gamma`: 1 is Poisson, less is
    burstier, more is more regular; `vllm bench serve` means the same by it), or all equal (`constant`). Their mean is
    1 / requests_per_second; at an infinite rate everybody arrives at 0. Raises UsageError.
    """
    if not requests_per_second > 0:
        raise UsageError(f"--request-rate {requests_per_second:g} is not above 0; `inf` sends everything at once")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise UsageError(f"--burstiness {burstiness:g} is not a number above 0; 1 is a Poisson process")
    return _sums(process, requests_per_second, burstiness, random)


def _sums(process: ArrivalProcess, rate: float, burstiness: float, random: numpy.random.Generator) -> Iterator[float]:
    shape = 1.0 if process == "poisson" else burstiness
    now = 0.0
    while True:
        if math.isfinite(rate):
            now += 1 / rate if process == "constant" else float(random.gamma(shape, 1 / (rate * shape)))
        yield now
