"""Which of the settings that differ between two runs make a condition hold."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from eventlm.errors import UsageError
from eventlm.replay.predicate.observation import changed_options
from eventlm.replay.predicate.oracle import BudgetSpentError, Oracle, Variant
from eventlm.replay.shrink.minimize import OnDemand, minimize_list
from eventlm.replay.workload.workload import Workload


class Setting(Struct, frozen=True, kw_only=True):
    """An option that differs: its value where the condition does not hold, and where it holds.

    error: of one that decides, why nothing can be simulated with its other value beside those of the others that
    decide. Whether it matters by itself is then unknown.
    """

    name: str
    where_not: Any
    where_holds: Any
    error: str = ""


class DecidingSettings(Struct, frozen=True, kw_only=True):
    """All settings that differ, and those that together make the condition hold, of which none can go.

    holds_in_first: whether the condition holds with the settings of the first run, or with those of the second.
    stopped: why fewer may do, else "".
    """

    differing: list[Setting]
    deciding: list[Setting]
    holds_in_first: bool
    stopped: str = ""


def find_settings(
    oracle: Oracle, workload: Workload, first: dict[str, Any], second: dict[str, Any]
) -> DecidingSettings:
    """Serve one workload with the options of two engines, and with those between them.

    Raises UsageError if the options are the same, or if the condition holds with both or neither; and BudgetSpentError
    if that is not known in time.
    """
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    if not names:
        raise UsageError("the two runs have the same settings, so there is none to name")
    try:
        results = oracle.results([Variant(workload, first), Variant(workload, second)])
    except BudgetSpentError as error:
        raise error.before("both settings were simulated") from None
    for result, which in zip(results, ("first", "second"), strict=True):
        if result.error:
            raise UsageError(f"the workload cannot be simulated with the settings of the {which} run: {result.error}")
    if results[0].holds == results[1].holds:
        both = "both" if results[0].holds else "neither"
        raise UsageError(
            f"--keep {oracle.condition!r} holds with the settings of {both} runs: nothing tells them apart"
        )
    holds_in_first = results[0].holds
    without, with_ = (second, first) if holds_in_first else (first, second)

    def variant(changed: list[str]) -> Variant:
        options = {name: value for name, value in without.items() if name not in changed}
        return Variant(workload, changed_options(options, {name: with_[name] for name in changed if name in with_}))

    deciding = names

    def first_kept(lists: OnDemand[list[str]]) -> int | None:
        nonlocal deciding
        kept = oracle.first(OnDemand(len(lists), lambda index: variant(lists[index])))
        # If the budget ends in the middle, this is not lost.
        deciding = deciding if kept is None else lists[kept]
        return kept

    stopped, errors = "", {}
    try:
        minimize_list(names, first_kept)
        rests = [variant([each for each in deciding if each != name]) for name in deciding]
        errors = {name: result.error for name, result in zip(deciding, oracle.results(rests), strict=True)}
    except BudgetSpentError as error:
        stopped = str(error)
    differing = {name: Setting(name=name, where_not=without.get(name), where_holds=with_.get(name)) for name in names}
    return DecidingSettings(
        differing=list(differing.values()),
        deciding=[structs.replace(differing[name], error=errors.get(name, "")) for name in deciding],
        holds_in_first=holds_in_first,
        stopped=stopped,
    )
