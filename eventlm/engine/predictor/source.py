"""Where a run's step-time coefficients come from: the config, else the cache file, else a warm-up at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import structlog

from eventlm.config import Config
from eventlm.core.predictor import NUM_COEFFICIENTS
from eventlm.engine.predictor.cache import PredictorCache, predictor_cache
from eventlm.engine.predictor.fit import fit
from eventlm.worker.protocol import FAKE_MODEL, StepSample, WorkerSetup

#: `scaled`: the defaults, made as slow as the few steps that a warm-up had time for.
Origin = Literal["config", "cache", "warm-up", "scaled", "default"]

#: The built-in policies and batchers that do not look at them.
_WITHOUT_TIMES = ("fcfs", "lpm", "fixed")

log = structlog.get_logger("eventlm.predictor")


class PredictorSource:
    """Asked twice in a start: before it whether a worker must measure, behind it for the coefficients.

    `worker` is the setup of the worker that would measure. Raises CheckpointError.
    """

    def __init__(self, config: Config, worker: WorkerSetup) -> None:
        self._config = config
        self.origin: Origin = "config"
        self._known = config.scheduler.predictor
        self._cache: PredictorCache | None = None
        # The fake model has a formula in a measurement's place.
        if not self._known and config.scheduler.predictor_cache and worker.model != FAKE_MODEL:
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
                _tell_of_guess(len(samples), flags_that_predict(self._config))
                return self._known
            if self._cache is not None:
                self._cache.write(self._known)
        if self._cache is not None:
            # The file is what to remove where the figures are bad, as those of a busy machine are.
            log.info("step times known", origin=self.origin, coefficients=self._known, file=str(self._cache.path))
        return self._known


def flags_that_predict(config: Config) -> list[str]:
    """What of the configuration goes by predicted times, as it is given on the command line."""
    scheduler = config.scheduler
    policy, batcher = scheduler.policy["type"], scheduler.batcher["type"]
    flags = [f"--policy {policy}"] * (policy not in _WITHOUT_TIMES)
    flags += [
        f"--extra-policy {spec}" for spec in scheduler.extra_policy if spec.partition(":")[0] not in _WITHOUT_TIMES
    ]
    flags += [f"--batcher {batcher}"] * (batcher not in _WITHOUT_TIMES)
    return flags + [f"--service-class {name}" for name, each in config.classes.items() if each.drop_if_late]


def _tell_of_guess(num_samples: int, flags: list[str]) -> None:
    if not flags:
        log.info("step times estimated", num_measured_steps=num_samples)
        return
    log.warning(
        f"{flags[0]} goes by predicted step times, which are roughly estimated: {num_samples} of at least "
        f"{NUM_COEFFICIENTS} steps could be measured",
        remedy="make room for steps of several sizes (--max-num-batched-tokens, --max-num-seqs, --max-model-len, "
        "--num-blocks), or give --predictor the coefficients of another start",
    )
