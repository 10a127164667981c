"""CUDA graphs of steps that only decode: captured for batches of several sizes, replayed with other numbers in place.

A graph's launches cost the processor as much as one. All graphs share their memory, for only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Computes a padded batch of so many rows from what lies in the staging buffer, into the same memory each time.
Compute = Callable[[int], Tensor]
#: Before a capture everything has run as often, so that nothing is compiled or allocated within.
_NUM_WARM_UPS = 2


class DecodeGraphs:
    """A graph for each of the `buckets`; on a device without graphs what they would do is done each time."""

    def __init__(self, buckets: Sequence[int], compute: Compute, device: torch.device) -> None:
        self._compute = compute
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}
        #: What the graphs take of the device's memory.
        self.num_bytes = 0
        if device.type == "cuda":
            before = torch.cuda.mem_get_info(device)[0]
            self._capture(buckets)
            torch.cuda.synchronize(device)
            self.num_bytes = max(before - torch.cuda.mem_get_info(device)[0], 0)

    def _capture(self, buckets: Sequence[int]) -> None:
        """The largest first: what it takes is enough for the others."""
        pool = None
        for bucket in sorted(buckets, reverse=True):
            for _ in range(_NUM_WARM_UPS):
                self._compute(bucket)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[bucket] = self._compute(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph

    def __call__(self, bucket: int) -> Tensor:
        """What `compute` gives, without its launches where there is a graph."""
        graph = self._graphs.get(bucket)
        if graph is None:
            return self._compute(bucket)
        graph.replay()
        return self._outputs[bucket]
