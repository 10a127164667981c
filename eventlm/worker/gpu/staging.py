"""The way of a step's numbers to the device: one pinned buffer, one asynchronous copy, views of what arrives.

Several buffers take turns, so that a step can be written down while the copy of the one before is still to come.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Views begin at multiples of 16 bytes: kernels are compiled once for addresses of that kind, once for others.
ALIGNMENT = 4


def aligned(size: int) -> int:
    """The next size at whose end a view may begin."""
    return size + -size % ALIGNMENT


class Staging:
    """Room for `capacity` int32 in a step, and for `num_steps` steps on their way."""

    def __init__(self, capacity: int, num_steps: int, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_gpu) for _ in range(num_steps)]
        self._arrays = [host.numpy() for host in self._hosts]
        #: Recorded after each buffer's last copy.
        self._copied: list[torch.cuda.Event | None] = [None] * num_steps
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """A new step. Waits until the buffer's earlier copy has been made."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._used = 0
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()

    def put(self, numbers: np.ndarray) -> Tensor:
        """Where these int32 will lie on the device, in their shape, once they are sent."""
        start, end = self._used, self._used + numbers.size
        self._arrays[self._turn][start:end] = numbers.ravel()
        self._used = aligned(end)
        return self._device[start:end].view(numbers.shape)

    def view(self, *shape: int) -> Tensor:
        """The first numbers of a step on the device, in this shape: the same memory for all steps."""
        return self._device[: int(np.prod(shape))].view(shape)

    def send(self) -> None:
        """Copy what was put to the device, after everything that was launched before."""
        host = self._hosts[self._turn][: self._used]
        self._device[: self._used].copy_(host, non_blocking=True)
        if self._is_gpu:
            copied = self._copied[self._turn] = self._copied[self._turn] or torch.cuda.Event()
            copied.record()
