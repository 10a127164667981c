"""Answers whether a condition holds for variants, in several processes.

The answer does not depend on the number of processes: of variants in a row the first that keeps the condition counts,
whichever was known first. What is tried beyond that is remembered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from eventlm.config import CacheConfig
from eventlm.errors import EventLMError, UsageError
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.expressions.parser import parse
from eventlm.replay.pool.pool import ProcessPool
from eventlm.replay.predicate.environment import check_condition
from eventlm.replay.predicate.trial import Trial, TrialResult
from eventlm.replay.workload.file import encode_workload
from eventlm.replay.workload.workload import Workload
from eventlm.types import NANOSECONDS_PER_SECOND

WORKER = "eventlm.replay.predicate.worker"


class Variant(NamedTuple):
    """A workload and the options of the engine that serves it."""

    workload: Workload
    options: dict[str, Any]

    def with_option(self, name: str, value: int) -> Variant:
        """With another number. Where blocks become fewer, the context is cut to what they hold."""
        options = {**self.options, name: value}
        if name == "num_blocks" and "max_model_len" in options:
            holds = max(value - 1, 1) * options.get("block_size", CacheConfig().block_size)
            options["max_model_len"] = min(options["max_model_len"], holds)
        return Variant(self.workload, options)


class Variants(Protocol):
    """A list of them, or something that makes each when it is asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Variant:
        """The one at an index."""


class Budget(NamedTuple):
    """How long to go on; None: without a limit. Only a number of simulations gives the same result everywhere."""

    seconds: float | None = None
    num_trials: int | None = None


UNLIMITED = Budget()


class BudgetSpentError(EventLMError):
    """No more trials may be made."""


class Oracle:
    """Tries one condition. Use it in a `with` block, which ends its processes.

    on_trial: called after each trial with their number. Raises ExpressionError for a condition that makes no sense.
    """

    def __init__(
        self,
        condition: str,
        cost: LinearCost | RooflineCost,
        *,
        num_jobs: int,
        budget: Budget = UNLIMITED,
        on_trial: Callable[[int], None] | None = None,
    ) -> None:
        check_condition(parse(condition))
        if num_jobs < 1:
            raise UsageError(f"--jobs {num_jobs}: at least 1 is needed")
        self.condition = condition
        self.cost = cost
        self._budget = budget
        self._on_trial = on_trial
        self._num_jobs = num_jobs
        self._pool: ProcessPool[Trial, TrialResult] = ProcessPool(WORKER, TrialResult, _failed, num_jobs=num_jobs)
        self._known: dict[str, TrialResult] = {}
        self._counted: set[str] = set()
        self._began_ns = time.monotonic_ns()

    @property
    def num_trials(self) -> int:
        """Simulations whose results were needed, each counted once."""
        return len(self._counted)

    def result(self, variant: Variant) -> TrialResult:
        """The result of one. Raises BudgetSpentError."""
        return next(self._results([variant]))

    def holds(self, variant: Variant) -> bool:
        """Whether one keeps the condition. Raises BudgetSpentError."""
        return self.result(variant).holds

    def first(self, variants: Variants) -> int | None:
        """The index of the first that keeps the condition. Raises BudgetSpentError."""
        return next((index for index, result in enumerate(self._results(variants)) if result.holds), None)

    def results(self, variants: Variants) -> list[TrialResult]:
        """The results of all. Raises BudgetSpentError."""
        return list(self._results(variants))

    def _results(self, variants: Variants) -> Iterator[TrialResult]:
        """One after the other; the next ones are tried beside each."""
        trials: dict[int, tuple[str, Trial]] = {}

        def made(index: int) -> tuple[str, Trial]:
            if index not in trials:
                trials[index] = self._trial(variants[index])
            return trials[index]

        for index in range(len(variants)):
            key, _ = made(index)
            if key not in self._counted:
                self._spend()
                self._counted.add(key)
                if key not in self._known:
                    beside = range(index, min(index + self._num_jobs, len(variants)))
                    batch = dict(made(each) for each in beside)
                    missing = [trial for each, trial in batch.items() if each not in self._known]
                    self._pool.run(missing, self._learn)
                if self._on_trial is not None:
                    self._on_trial(self.num_trials)
            del trials[index]
            yield self._known[key]

    def _learn(self, trial: Trial, result: TrialResult) -> None:
        self._known[_key(trial)] = result

    def _trial(self, variant: Variant) -> tuple[str, Trial]:
        content = encode_workload(variant.workload).decode()
        trial = Trial(workload=content, options=variant.options, cost=self.cost, condition=self.condition)
        return _key(trial), trial

    def _spend(self) -> None:
        seconds, num_trials = self._budget
        if num_trials is not None and self.num_trials >= num_trials:
            raise BudgetSpentError(f"{num_trials} simulations are used up")
        if seconds is not None and time.monotonic_ns() - self._began_ns > seconds * NANOSECONDS_PER_SECOND:
            raise BudgetSpentError(f"{seconds:g} s are used up")

    def __enter__(self) -> Oracle:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)


def _failed(error: str) -> TrialResult:
    return TrialResult(error=error)


def _key(trial: Trial) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(trial, order="deterministic"))
