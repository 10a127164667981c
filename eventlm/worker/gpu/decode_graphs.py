"""CUDA graphs of steps that only decode: captured for batches of several sizes, replayed with other numbers in place.

A graph's launches cost the processor as much as one. All graphs share their memory, for only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eventlm.types import OnProgress

#: Puts a batch of so many rows, all of them padding, where `Compute` reads it.
StagePadding = Callable[[int], None]
#: Computes a padded batch of so many rows from what lies in the staging buffer, into the same memory each time.
Compute = Callable[[int], Tensor]
#: Before a capture everything has run as often, so that nothing is compiled or allocated within.
_NUM_WARM_UPS = 2


class DecodeGraphs:
    """A graph for each of the `buckets`; on a device without graphs what they would do is done each time."""

    def __init__(
        self,
        buckets: Sequence[int],
        stage_padding: StagePadding,
        compute: Compute,
        device: torch.device,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._stage_padding, self._compute = stage_padding, compute
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outputs: dict[int, Tensor] = {}
        #: What the graphs take of the device's memory.
        self.num_bytes = 0
        if device.type == "cuda":
            before = _free_bytes(device)
            self._capture(buckets, on_progress)
            self.num_bytes = max(before - _free_bytes(device), 0)

    def _capture(self, buckets: Sequence[int], on_progress: OnProgress | None) -> None:
        """The largest first: what it takes is enough for the others."""
        pool = None
        for number, bucket in enumerate(sorted(buckets, reverse=True), 1):
            self._stage_padding(bucket)
            for _ in range(_NUM_WARM_UPS):
                self._compute(bucket)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[bucket] = self._compute(bucket)
            pool = pool or graph.pool()
            self._graphs[bucket] = graph
            if on_progress is not None:
                on_progress(number, len(buckets))

    def __call__(self, bucket: int) -> Tensor:
        """What `compute` gives, without its launches where there is a graph."""
        graph = self._graphs.get(bucket)
        if graph is None:
            return self._compute(bucket)
        graph.replay()
        return self._outputs[bucket]


def _free_bytes(device: torch.device) -> int:
    """Of the device, with what the allocator keeps: a capture gives that back, and would seem to cost less."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
