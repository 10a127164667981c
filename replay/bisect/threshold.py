"""The value of a setting at which a condition begins or ends to hold."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from eventlm.config.options import options
from eventlm.errors import UsageError
from eventlm.replay.predicate.oracle import Oracle, Variant

#: Short names of what is bisected most often.
ALIASES = {"blocks": "num_blocks", "seqs": "max_num_seqs", "budget": "max_num_batched_tokens"}
#: Not an option of the engine: a factor on the arrival rate, in parts per million.
LOAD = "load"
#: Values that are tried before the search, which would miss what does not begin once and for all.
NUM_SAMPLES = 9


class SampledValue(Struct, frozen=True, kw_only=True):
    """A value that was tried. error: why it could not be simulated; the condition then does not hold."""

    value: int
    holds: bool
    error: str = ""


class Threshold(Struct, frozen=True, kw_only=True):
    """Between `below` and the next value `above` the condition changes: it holds on one side. Both None: it does not
    change between the samples.

    is_monotone: the samples change once at most; otherwise this is the first change of several.
    """

    name: str
    samples: list[SampledValue]
    is_monotone: bool
    below: int | None = None
    above: int | None = None
    holds_above: bool = False


def setting_named(name: str) -> str:
    """The option of a name or an alias. Raises UsageError for what is no number of an engine."""
    option = ALIASES.get(name, name)
    if option != LOAD and (option not in options() or options()[option].bare_type is not int):
        known = ", ".join([*ALIASES, LOAD])
        raise UsageError(
            f"--over {name}: not a number of an engine; write one of {known}, or an option such as max_skips"
        )
    return option


def find_threshold(oracle: Oracle, start: Variant, name: str, low: int, high: int) -> Threshold:
    """Search from `low` to `high`. Raises UsageError for an empty range or if no value can be simulated, and
    BudgetSpentError.
    """
    if low >= high:
        raise UsageError(f"--over {name}={low}..{high}: the first value must be below the second")
    values = sorted({low + (high - low) * each // (NUM_SAMPLES - 1) for each in range(NUM_SAMPLES)})
    results = oracle.results([_variant(start, name, value) for value in values])
    samples = [
        SampledValue(value=value, holds=result.holds, error=result.error)
        for value, result in zip(values, results, strict=True)
    ]
    if all(sample.error for sample in samples):
        raise UsageError(f"--over {name}={low}..{high}: no value can be simulated: {samples[-1].error}")
    changes = [(before, after) for before, after in pairwise(samples) if before.holds != after.holds]
    if not changes:
        return Threshold(name=name, samples=samples, is_monotone=True)
    before, after = changes[0]
    below, above = before.value, after.value
    while above - below > 1:
        middle = (below + above) // 2
        if oracle.holds(_variant(start, name, middle)) == before.holds:
            below = middle
        else:
            above = middle
    return Threshold(
        name=name,
        samples=samples,
        is_monotone=len(changes) == 1,
        below=below,
        above=above,
        holds_above=after.holds,
    )


def _variant(start: Variant, name: str, value: int) -> Variant:
    if name == LOAD:
        return Variant(start.workload.sped_up(value), start.options)
    return start.with_option(name, value)
