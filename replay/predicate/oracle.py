"""Answers whether a condition holds for variants, in several processes.

The answer does not depend on the number of processes: of variants in a row the first that keeps the condition counts,
whichever was known first. What is tried beyond that is remembered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from eventlm.errors import EventLMError, UsageError
from eventlm.formatting import counted
from eventlm.replay.cost.files import FileCost
from eventlm.replay.expressions.parser import parse
from eventlm.replay.pool.pool import ProcessPool
from eventlm.replay.predicate.environment import check_condition
from eventlm.replay.predicate.observation import changed_options
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
        """With another number, as `changed_options` changes it."""
        return Variant(self.workload, changed_options(self.options, {name: value}))


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

    def before(self, what: str) -> BudgetSpentError:
        """The same where it leaves nothing to report."""
        return BudgetSpentError(f"{self} before {what}; raise --budget")


class Oracle:
    """Tries one condition. Use it in a `with` block, which ends its processes.

    on_trial: called after each trial with their number. Raises ExpressionError for a condition that makes no sense.
    """

    def __init__(
        self,
        condition: str,
        cost: FileCost,
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
        return next(self.each([variant]))

    def figures(self, variant: Variant) -> dict[str, str]:
        """What the condition compares in one, in words; empty if it cannot be simulated in time."""
        _, trial = self._trial(variant)
        explained = msgspec.structs.replace(trial, with_figures=True)
        with contextlib.suppress(BudgetSpentError):
            self._run([explained])
        found = self._known.get(_key(explained))
        return found.figures if found is not None else {}

    def holds(self, variant: Variant) -> bool:
        """Whether one keeps the condition. Raises BudgetSpentError."""
        return self.result(variant).holds

    def first(self, variants: Variants) -> int | None:
        """The index of the first that keeps the condition. Raises BudgetSpentError."""
        return next((index for index, result in enumerate(self.each(variants)) if result.holds), None)

    def results(self, variants: Variants) -> list[TrialResult]:
        """The results of all. Raises BudgetSpentError."""
        return list(self.each(variants))

    def each(self, variants: Variants) -> Iterator[TrialResult]:
        """One result after the other; the next ones are tried beside each. Raises BudgetSpentError."""
        trials: dict[int, tuple[str, Trial]] = {}

        def made(index: int) -> tuple[str, Trial]:
            if index not in trials:
                trials[index] = self._trial(variants[index])
            return trials[index]

        for index in range(len(variants)):
            key, _ = made(index)
            if key not in self._counted:
                self._check_budget()
                if key not in self._known:
                    beside = range(index, min(index + self._num_jobs, len(variants)))
                    batch = dict(made(each) for each in beside)
                    self._run([trial for each, trial in batch.items() if each not in self._known])
                self._counted.add(key)
                if self._on_trial is not None:
                    self._on_trial(self.num_trials)
            del trials[index]
            yield self._known[key]

    def _run(self, trials: list[Trial]) -> None:
        """Raises BudgetSpentError if they take longer than the budget allows."""
        try:
            self._pool.run(trials, self._learn, timeout_s=self._seconds_left())
        except TimeoutError:
            raise self._spent() from None

    def _learn(self, trial: Trial, result: TrialResult) -> None:
        self._known[_key(trial)] = result

    def _trial(self, variant: Variant) -> tuple[str, Trial]:
        content = encode_workload(variant.workload).decode()
        trial = Trial(workload=content, options=variant.options, cost=self.cost, condition=self.condition)
        return _key(trial), trial

    def _check_budget(self) -> None:
        """Raise BudgetSpentError if no other trial may be made."""
        most, left = self._budget.num_trials, self._seconds_left()
        if (most is not None and self.num_trials >= most) or (left is not None and left <= 0):
            raise self._spent()

    def _seconds_left(self) -> float | None:
        seconds = self._budget.seconds
        return None if seconds is None else seconds - (time.monotonic_ns() - self._began_ns) / NANOSECONDS_PER_SECOND

    def _spent(self) -> BudgetSpentError:
        seconds, num_trials = self._budget
        words = f"{seconds:g} s" if seconds is not None else counted(num_trials or 0, "simulation")
        return BudgetSpentError(f"the budget of {words} is spent")

    def __enter__(self) -> Oracle:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)


def _failed(error: str) -> TrialResult:
    return TrialResult(error=error)


def _key(trial: Trial) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(trial, order="deterministic"))
