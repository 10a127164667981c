"""Reports what a worker does before it is ready: that may take minutes, and must not look like a hang."""

from __future__ import annotations

from collections.abc import Callable

#: Called with a phase in words, how much of it is done and how much there is; 0 of 0 where nothing is counted.
OnPhase = Callable[[str, int, int], None]

LOADING_LIBRARIES = "loading libraries"
READING_WEIGHTS = "reading weights"
TORCH_COMPILE = "compiling with torch.compile"
MEASURING_MEMORY = "measuring memory"
COMPILING_KERNELS = "compiling kernels"
CAPTURING_GRAPHS = "capturing CUDA graphs"
MEASURING_STEPS = "measuring steps"


class StartReport:
    """One phase after the other. `on_phase` is called when one begins, then once at most for each percent of it."""

    def __init__(self, on_phase: OnPhase | None = None) -> None:
        self._on_phase = on_phase
        self._phase = ""
        self._percent = 0

    def begin(self, phase: str) -> None:
        """The phase before is over."""
        self._phase, self._percent = phase, 0
        if self._on_phase is not None:
            self._on_phase(phase, 0, 0)

    def progress(self, done: int, total: int) -> None:
        """How far the phase is."""
        percent = 100 * done // total
        if percent > self._percent and self._on_phase is not None:
            self._on_phase(self._phase, done, total)
        self._percent = percent
