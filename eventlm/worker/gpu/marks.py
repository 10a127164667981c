"""Points on the device's line of work: whether it is past them, and how long it took from one to the next."""

from __future__ import annotations

import time

import torch

from eventlm.worker.gpu.device import clear_errors


class Mark:
    """Set behind all that has been launched. A processor does everything at once, so it is past every mark."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: When it was set, on this machine's monotonic clock.
        self.set_ns = time.monotonic_ns()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def is_past(self) -> bool:
        """Whether the device is past it. Raises GpuError if something went wrong on the device before it."""
        with clear_errors(self._device):
            return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until the device is past it. Raises as `is_past`."""
        if self._event is not None:
            with clear_errors(self._device):
                self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        """How long the device took from an earlier mark to this one; it must be past both."""
        if self._event is None or earlier._event is None:
            return self.set_ns - earlier.set_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)
