"""A trial: does a condition hold in a simulation? In JSON, so that any process can answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.errors import EventLMError
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.cost.files import FileCost
from eventlm.replay.expressions.evaluation import holds, uses
from eventlm.replay.expressions.parser import parse
from eventlm.replay.expressions.syntax import Expression
from eventlm.replay.predicate.environment import BROKEN, OutcomeEnvironment, check_condition, figures_of
from eventlm.replay.predicate.observation import Observation, changed_options, observe
from eventlm.replay.workload.file import decode_workload, read_workload
from eventlm.replay.workload.workload import Workload


class Trial(Struct, frozen=True, kw_only=True):
    """workload: the content of a workload file. options: of the engine's configuration, by name. with_figures: the
    result is to have them.
    """

    workload: str
    options: dict[str, Any]
    cost: FileCost
    condition: str
    with_figures: bool = False


class TrialResult(Struct, frozen=True, kw_only=True):
    """Whether the condition holds. error: why the simulation could not be made; then it does not.

    figures: what the condition compares, in words.
    """

    holds: bool = False
    error: str = ""
    figures: dict[str, str] = {}


def run_trial(trial: Trial) -> TrialResult:
    """Simulate and evaluate; errors are results too."""
    try:
        workload = decode_workload(trial.workload.encode(), "the workload")
        condition = parse(trial.condition)
        environment = simulated_environment(workload, trial.options, trial.cost, condition)
        figures = figures_of(condition, environment) if trial.with_figures else {}
        return TrialResult(holds=holds(condition, environment), figures=figures)
    except EventLMError as error:
        return TrialResult(error=str(error))
    except Exception as error:
        # Other trials may succeed.
        return TrialResult(error=f"a defect, {type(error).__name__}: {error}")


def simulated_environment(
    workload: Workload, options: Mapping[str, Any], cost: AnyCost, condition: Expression
) -> OutcomeEnvironment:
    """What a condition is about. Raises UsageError for an engine or a workload that makes no sense."""
    validates = BROKEN in uses(condition).names
    observed = observe(workload, options, cost, validates=validates)

    def observe_other(changes: dict[str, Any]) -> Observation:
        return observe(workload, changed_options(options, changes), cost)

    return OutcomeEnvironment(observed, observe_other)


def holds_in(path: Path | str, condition: str, *, options: Mapping[str, Any], cost_model: Mapping[str, Any]) -> bool:
    """Whether a condition holds when a workload file is simulated, as the tests say that `eventlm shrink` writes.

    cost_model: as in the header of a simulated run. Raises UsageError.
    """
    expression = parse(condition)
    check_condition(expression)
    cost: FileCost = msgspec.convert(dict(cost_model), FileCost)
    return holds(expression, simulated_environment(read_workload(path), options, cost, expression))
