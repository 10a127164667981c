"""One measurement of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class KernelCase(NamedTuple):
    """`run` launches the kernel and gives its output; `reference` is what that should be, in float32 or float64.

    `num_bytes` that must move through the device's memory and `num_flops` that must be done, at the least, say what the
    limit is. `peer` does the same with what others wrote, where there is such a thing. `tolerance` is of
    |output - reference| / |reference|. `target` is the part of the limit's rate that is to be reached, 0: none is set;
    `peer_target` the same of the peer's rate. `prepare` is called before each run that is timed, outside of the time,
    for kernels that work in place.
    """

    name: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    num_bytes: int
    num_flops: int = 0
    tolerance: float = 1e-2
    peer: Callable[[], Tensor] | None = None
    peer_name: str = ""
    target: float = 0.0
    peer_target: float = 0.0
    prepare: Callable[[], None] | None = None
