"""The source of a run's step-time coefficients: the configuration, else the cache file, else a warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import structlog

from eventlm.config import Config
from eventlm.core.predictor import NUM_COEFFICIENTS
from eventlm.engine.predictor.cache import PredictorCache, predictor_cache
from eventlm.engine.predictor.fit import fit
from eventlm.worker.protocol import FAKE_MODEL, StepSample, WorkerSetup

#: `scaled`: the defaults, scaled to the few steps that a warm-up had time for.
Origin = Literal["config", "cache", "warm-up", "scaled", "default"]

#: Of a backend nothing is known but that prompts take time: 50 us a token.
BACKEND_COEFFICIENTS = (0, 50_000_000, 0, 0, 0)

#: The built-in policies and batchers that do not use them.
_WITHOUT_TIMES = ("fcfs", "lpm", "fixed")

log = structlog.get_logger("eventlm.predictor")


class PredictorSource:
    """Used twice in a start: before it, for whether a worker must measure; after it, for the coefficients.

    `worker` is the setup of the worker that would measure; None: of backends, which are not measured. Raises
    CheckpointError.
    """

    def __init__(self, config: Config, worker: WorkerSetup | None) -> None:
        self._config = config
        self.origin: Origin = "config"
        self._known = config.scheduler.predictor
        self._cache: PredictorCache | None = None
        if worker is None:
            self.origin, self._known = "default", list(BACKEND_COEFFICIENTS)
            return
        # The fake model has a formula instead of measurements.
        if not self._known and config.scheduler.predictor_cache and worker.model != FAKE_MODEL:
            self._cache = predictor_cache(worker)
            self.origin, self._known = "cache", self._cache.read()

    @property
    def must_measure(self) -> bool:
        """Whether the coefficients need a warm-up."""
        return not self._known

    def coefficients(self, samples: Sequence[StepSample]) -> list[int]:
        """The coefficients of the run; sets `origin`. Measured ones are kept for the next start."""
        if self.must_measure:
            self._known = fit(samples)
            self.origin = "warm-up" if len(samples) >= NUM_COEFFICIENTS else "scaled" if samples else "default"
            if self.origin != "warm-up":
                _log_guess(len(samples), flags_that_predict(self._config))
                return self._known
            if self._cache is not None:
                self._cache.write(self._known)
        if self._cache is not None:
            # The path, because a user removes the file if a busy machine has spoilt the figures.
            log.info("step times known", origin=self.origin, coefficients=self._known, file=str(self._cache.path))
        return self._known


def flags_that_predict(config: Config) -> list[str]:
    """The command-line flags of the configured parts that use predicted times."""
    scheduler = config.scheduler
    policy, batcher = scheduler.policy["type"], scheduler.batcher["type"]
    flags = [f"--policy {policy}"] * (policy not in _WITHOUT_TIMES)
    flags += [
        f"--extra-policy {spec}" for spec in scheduler.extra_policy if spec.partition(":")[0] not in _WITHOUT_TIMES
    ]
    flags += [f"--batcher {batcher}"] * (batcher not in _WITHOUT_TIMES)
    return flags + [f"--service-class {name}" for name, each in config.classes.items() if each.drop_if_late]


def _log_guess(num_samples: int, flags: list[str]) -> None:
    if not flags:
        log.info("step times estimated", num_measured_steps=num_samples)
        return
    log.warning(
        f"{flags[0]} goes by predicted step times, which are roughly estimated: {num_samples} of at least "
        f"{NUM_COEFFICIENTS} steps could be measured",
        remedy="make room for steps of several sizes (--max-num-batched-tokens, --max-num-seqs, --max-model-len, "
        "--num-blocks), or give --predictor the coefficients of another start",
    )
