"""The value of a setting at which a condition begins or ends to hold."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from eventlm.config.options import ENGINE_OPTIONS, options
from eventlm.errors import UsageError
from eventlm.replay.predicate.oracle import BudgetSpentError, Oracle, Variant
from eventlm.replay.predicate.trial import TrialResult

#: Short names of what is bisected most often.
ALIASES = {"blocks": "num_blocks", "seqs": "max_num_seqs", "tokens": "max_num_batched_tokens"}
#: Not an option of the engine: a factor on the arrival rate, in parts per million.
LOAD = "load"
#: Values that are tried before the search, which would miss what does not begin once and for all.
NUM_SAMPLES = 9


class SampledValue(Struct, frozen=True, kw_only=True):
    """A value that was tried. error: why it could not be simulated; whether the condition holds there is unknown."""

    value: int
    holds: bool
    error: str = ""


class Threshold(Struct, frozen=True, kw_only=True):
    """The condition changes between `below` and `above`, which follow each other unless the search stopped: it holds on
    one side. Both None: it does not change between the samples.

    samples: in ascending order. Beside those that are spread over the range, the first and last that can be simulated,
    with their neighbours that cannot. is_monotone: the samples change once at most; otherwise this is the first change
    of several. stopped: why the search ended before it was done, else "".
    """

    name: str
    samples: list[SampledValue]
    is_monotone: bool = True
    below: int | None = None
    above: int | None = None
    holds_above: bool = False
    stopped: str = ""


def setting_named(name: str) -> str:
    """The option of a name or an alias. Raises UsageError for what is no number of an engine."""
    option = ALIASES.get(name, name)
    if option != LOAD and (option not in ENGINE_OPTIONS or options()[option].bare_type is not int):
        known = ", ".join([*ALIASES, LOAD])
        raise UsageError(
            f"--over {name}: not a number of an engine; write one of {known}, or an option such as max_skips"
        )
    return option


def find_threshold(oracle: Oracle, start: Variant, name: str, low: int, high: int) -> Threshold:
    """Search from `low` to `high`, among the values that can be simulated, as far as the budget goes.

    Raises UsageError for an empty range or if no sample can be simulated.
    """
    if low >= high:
        raise UsageError(f"--over {name}={low}..{high}: the first value must be below the second")
    return _Search(oracle, start, name).run(low, high)


class _Search:
    """samples: what the report shows, by value."""

    def __init__(self, oracle: Oracle, start: Variant, name: str) -> None:
        self._oracle = oracle
        self._start = start
        self._name = name
        self._samples: dict[int, TrialResult] = {}

    def run(self, low: int, high: int) -> Threshold:
        try:
            self._sample(low, high)
            self._find_limits()
        except BudgetSpentError as error:
            # The samples until then may show a change.
            return self._found(*next(iter(self._changes()), ()), stopped=str(error))
        changes = self._changes()
        if not changes:
            return self._found()
        below, above = changes[0]
        holds_below = self._samples[below].holds
        try:
            while above - below > 1:
                middle = (below + above) // 2
                result = self._result(middle)
                if result.error:
                    return self._found(below, above, stopped=f"{middle:,} cannot be simulated: {result.error}")
                if result.holds == holds_below:
                    below = middle
                else:
                    above = middle
        except BudgetSpentError as error:
            return self._found(below, above, stopped=str(error))
        return self._found(below, above)

    def _sample(self, low: int, high: int) -> None:
        values = sorted({low + (high - low) * each // (NUM_SAMPLES - 1) for each in range(NUM_SAMPLES)})
        # Each is kept at once: the budget may end before the next.
        for value, result in zip(values, self._oracle.each([self._variant(each) for each in values]), strict=True):
            self._samples[value] = result
        if all(result.error for result in self._samples.values()):
            last = self._samples[values[-1]].error
            raise UsageError(f"--over {self._name}={low}..{high}: no value can be simulated: {last}")

    def _find_limits(self) -> None:
        """Where values that can be simulated begin and end is a matter of the engine, not of the condition."""
        values = sorted(self._samples)
        valid = [value for value in values if not self._samples[value].error]
        if valid[0] > values[0]:
            self._find_limit(valid[0], values[values.index(valid[0]) - 1])
        if valid[-1] < values[-1]:
            self._find_limit(valid[-1], values[values.index(valid[-1]) + 1])

    def _find_limit(self, inside: int, outside: int) -> None:
        """Halve what lies between a value that can be simulated and one that cannot."""
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (inside, middle) if self._result(middle).error else (middle, outside)
        for value in (inside, outside):
            self._samples[value] = self._result(value)

    def _changes(self) -> list[tuple[int, int]]:
        """Neighbours among the samples that can be simulated, of which one keeps the condition."""
        valid = [value for value in sorted(self._samples) if not self._samples[value].error]
        return [pair for pair in pairwise(valid) if self._samples[pair[0]].holds != self._samples[pair[1]].holds]

    def _result(self, value: int) -> TrialResult:
        return self._oracle.result(self._variant(value))

    def _variant(self, value: int) -> Variant:
        if self._name == LOAD:
            return Variant(self._start.workload.sped_up(value), self._start.options)
        return self._start.with_option(self._name, value)

    def _found(self, below: int | None = None, above: int | None = None, *, stopped: str = "") -> Threshold:
        changes = self._changes()
        return Threshold(
            name=self._name,
            samples=[
                SampledValue(value=value, holds=result.holds, error=result.error)
                for value, result in sorted(self._samples.items())
            ],
            is_monotone=len(changes) <= 1,
            below=below,
            above=above,
            holds_above=bool(changes) and below is not None and self._samples[changes[0][1]].holds,
            stopped=stopped,
        )
