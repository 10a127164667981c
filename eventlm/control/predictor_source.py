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
            if self.origin != "warm-up":
                _warn_of_guess(len(samples), self._known)
                return self._known
            if self._cache is not None:
                self._cache.write(self._known)
        if self._cache is not None:
            # The file is what to remove where the figures are bad, as those of a busy machine are.
            log.info("step times known", origin=self.origin, coefficients=self._known, file=str(self._cache.path))
        return self._known


def _warn_of_guess(num_samples: int, coefficients: list[int]) -> None:
    log.warning(
        f"the step times are a guess: only {num_samples} of at least {NUM_COEFFICIENTS} steps could be "
        "measured at the start",
        coefficients=coefficients,
        affected="requests that are dropped if late may be dropped too early or too late, and what goes by predicted "
        "times is only roughly right: deadlines by default, the policies edf and lrs, the batchers dynamic and "
        "space-sharing",
        remedy="start on a machine that is not busy, with room for steps of several sizes (max_num_batched_tokens, "
        "max_num_seqs, max_model_len, num_blocks), or give --predictor the coefficients of a good start",
    )
