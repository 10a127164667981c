"""Where a run's step-time coefficients come from: the config, else the cache file, else a warm-up at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import structlog

from eventlm.config import SchedulerConfig
from eventlm.control.predictor_cache import PredictorCache, predictor_cache
from eventlm.control.predictor_fit import fit
from eventlm.core.predictor import NUM_COEFFICIENTS
from eventlm.worker.protocol import FAKE_MODEL, StepSample, WorkerSetup

#: `scaled`: the defaults, made as slow as the few steps that a warm-up had time for.
Origin = Literal["config", "cache", "warm-up", "scaled", "default"]

log = structlog.get_logger("eventlm.predictor")


class PredictorSource:
    """Asked twice in a start: before it whether a worker must measure, behind it for the coefficients.

    `worker` is the setup of the worker that would measure. Raises CheckpointError.
    """

    def __init__(self, config: SchedulerConfig, worker: WorkerSetup) -> None:
        self.origin: Origin = "config"
        self._known = config.predictor
        self._cache: PredictorCache | None = None
        # The fake model has a formula in a measurement's place.
        if not self._known and config.predictor_cache and worker.model != FAKE_MODEL:
            self._cache = predictor_cache(worker)
            self.origin, self._known = "cache", self._cache.read()

    @property
    def must_measure(self) -> bool:
        """Whether nothing is known without a warm-up."""
        return not self._known

    def coefficients(self, samples: Sequence[StepSample]) -> list[int]:
        """What the run goes by, and `origin` says why; what has been measured is kept for the next start."""
        if self.must_measure:
            self._known = fit(samples)
            self.origin = "warm-up" if len(samples) >= NUM_COEFFICIENTS else "scaled" if samples else "default"
            if self._cache is not None and self.origin == "warm-up":
                self._cache.write(self._known)
        if self._cache is not None:
            # The file is what to remove where the figures are bad, as those of a busy machine are.
            is_kept = self.origin not in ("scaled", "default")
            file = str(self._cache.path) if is_kept else "none: too few steps could be measured"
            log.info("step times known", origin=self.origin, coefficients=self._known, file=file)
        return self._known
