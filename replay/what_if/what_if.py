"""What-if: a recorded run's work for another engine, or for the same at other times.

    found = what_if("runs/latest", [Alternative(changes=Changes(policy={"type": "edf"}))])

It goes by steps, each of which makes the next one believable. The null test repeats the run with its own durations and
must come out as recorded. The baseline repeats it with modelled durations: what it is off by is the error bar of all
that follows. Where these follow the run's own pace, it is repeated once more with durations that do not, and the larger
error counts. Then each alternative runs with the model of the baseline. All of them are the core itself; no policy sees
a length that the engine did not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.config.objectives import Objectives
from eventlm.errors import EventLMError, ExitCode, UsageError
from eventlm.events import Gap, Header
from eventlm.formatting import counted
from eventlm.replay.cost.fit import FitReport, fit_cost
from eventlm.replay.cost.model import CostModel, StepShape
from eventlm.replay.cost.shapes import RecordedShapes
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.simulator import Simulator
from eventlm.replay.simulate.timing import ModelledTiming
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.what_if.compare import Comparison, Ran, compare
from eventlm.replay.what_if.engine import (
    Alternative,
    Engine,
    build_engine,
    incidents_of,
    names,
    simulated_header,
    workload_of,
)
from eventlm.replay.what_if.null_test import NullResult, null_test
from eventlm.replay.workload.recorded_policies import PolicySpan, what_if_note
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from eventlm.types import OnProgress

#: What is done, how much of it, and of how much.
OnStage = Callable[[str, int, int], None]


class NullTestError(EventLMError):
    """The run cannot be repeated: what an alternative would do cannot be told either."""

    exit_code = ExitCode.DIFFERENT


class Simulated(Struct, frozen=True, kw_only=True):
    """A simulated run.

    num_outside: steps whose shape lies outside those of the run. run_folder: where its trace lies; "" if none was asked
    for.
    """

    name: str
    description: str
    outcome: RunOutcome
    num_outside: int
    notes: list[str]
    run_folder: str = ""


class WhatIfResult(Struct, frozen=True, kw_only=True):
    """Everything that was found. null: None where the null test could not be made, and then `notes` say why.

    policies: those that the run had. fit: how good the cost model is; None for one that was given.
    """

    path: str
    header: Header
    policies: list[PolicySpan]
    null: NullResult | None
    fit: FitReport | None
    cost: CostModel
    objectives: Objectives | None
    recorded: RunOutcome
    baseline: Simulated
    alternatives: list[Simulated]
    comparison: Comparison
    notes: list[str]
    warnings: list[str]


def what_if(
    path: Path | str,
    alternatives: Sequence[Alternative],
    *,
    objectives: Objectives | None = None,
    cost_model: CostModel | None = None,
    output: Path | str | None = None,
    strict: bool = False,
    trust_local_plugins: bool = False,
    on_progress: OnStage | None = None,
) -> WhatIfResult:
    """Ask what alternatives would have done with a run's work.

    objectives: what requests without their own are measured by. cost_model: in place of one fitted to the run.
    output: a folder that gets the trace of each alternative. strict: a torn last line is an error.

    Raises UsageError for an alternative that makes no sense or a run without work, NullTestError, and what LogReader
    raises.
    """
    stage = _stages(on_progress)
    with LogReader(path) as log:
        header = log.header
    same = Alternative(changes=Changes(trust_local_plugins=trust_local_plugins))
    baseline, *engines = [build_engine(header, alternative) for alternative in (same, *alternatives)]
    collector = OutcomeCollector(objectives)
    run = read_run(path, strict=strict, subscribers=[collector.see], on_progress=stage("reading"))
    if not run.workload.requests:
        raise UsageError(
            f"{path}: no request arrived in it, so there is no work for another engine; `eventlm trace ls` lists "
            "other runs"
        )
    null, notes = _null_test(run, path, trust_local_plugins=trust_local_plugins)
    follows_run = all(alternative.follows_run for alternative in alternatives)
    if not follows_run:
        notes.append(
            "the baseline is under the recorded load, the alternatives are not: compare them with each other, and ask "
            "for the recorded policy too if you ask for others"
        )
    cost, fit = _cost(run, cost_model, follows_run=follows_run)
    machine = _Machine(run, cost, RecordedShapes(step.shape for step in run.steps), objectives)
    base, base_ran = machine.simulate("baseline", baseline, None, stage("simulating the baseline"))
    unpaced_ran = None
    if cost_model is None and follows_run:
        unpaced = machine._replace(cost=fit_cost(run.steps, follows_run=False).model)
        _, unpaced_ran = unpaced.simulate("baseline", baseline, None, stage("simulating it at an even pace"))
    simulated = [
        machine.simulate(name, engine, output, stage(f"simulating {name}"))
        for name, engine in zip(names(alternatives), engines, strict=True)
    ]
    recorded = collector.outcome()
    places = {request.s: place for place, request in enumerate(run.workload.requests)}
    recorded_ran = Ran(recorded, places, recorded.num_unfinished)
    return WhatIfResult(
        path=str(path),
        header=run.header,
        policies=run.policies,
        null=null,
        fit=fit,
        cost=cost,
        objectives=objectives,
        recorded=recorded,
        baseline=base,
        alternatives=[each for each, _ in simulated],
        comparison=compare(run.workload, recorded_ran, base_ran, [ran for _, ran in simulated], unpaced=unpaced_ran),
        notes=notes,
        warnings=run.warnings,
    )


def _cost(run: RecordedRun, given: CostModel | None, *, follows_run: bool) -> tuple[CostModel, FitReport | None]:
    if given is not None:
        return given, None
    fitted = fit_cost(run.steps, follows_run=follows_run)
    return fitted.model, fitted.report


def _stages(on_progress: OnStage | None) -> Callable[[str], OnProgress | None]:
    """Progress of one stage after the other."""

    def stage(name: str) -> Callable[[int, int], None] | None:
        return None if on_progress is None else lambda done, total: on_progress(name, done, total)

    return stage


def _null_test(run: RecordedRun, path: Path | str, *, trust_local_plugins: bool) -> tuple[NullResult | None, list[str]]:
    """The result, or None and why there is none. Raises NullTestError if the run comes out otherwise."""
    if run.header.s:
        left_out = counted(run.num_skipped, "request")
        return None, [
            f"no null test: the trace begins in the middle of the run, at event {run.header.s:,}; {left_out} under way "
            "there left out, and all engines start with an empty cache"
        ]
    if any(isinstance(marker, Gap) for marker in run.markers):
        return None, ["no null test: the trace has a gap, and what was under way there is not known to its end"]
    result = null_test(run, path, trust_local_plugins=trust_local_plugins)
    if result.difference:
        raise NullTestError(
            f"{path}: the null test failed, so nothing can be said of an alternative: repeated with its own durations, "
            f"the run differs at {result.difference} (`eventlm replay` without changes tells more)"
        )
    return result, []


class _Machine(NamedTuple):
    """What all simulations of a run share."""

    run: RecordedRun
    cost: CostModel
    shapes: RecordedShapes
    objectives: Objectives | None

    def simulate(
        self,
        name: str,
        engine: Engine,
        folder: Path | str | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[Simulated, Ran]:
        """Run the work through an engine; the folder gets its trace."""
        num_outside = 0

        def look(shape: StepShape) -> None:
            nonlocal num_outside
            num_outside += not self.shapes.is_inside(shape)

        header = simulated_header(self.run, engine, name, self.cost)
        workload = workload_of(self.run, engine.alternative)
        collector = OutcomeCollector(self.objectives)
        trace = SimulatedTrace(folder, header.run) if folder is not None else None
        with trace or contextlib.nullcontext():
            simulator = Simulator(
                header,
                engine.rebuilt.new_core(),
                workload,
                ModelledTiming(self.cost, engine.config.num_replicas, on_shape=look),
                incidents=incidents_of(self.run, engine),
                closed_loop=engine.alternative.closed_loop,
                checkpoint_events=CHECKPOINT_EVENTS if trace is not None else 0,
                subscribers=[collector.see, *([trace.see] if trace is not None else [])],
            )
            simulator.run(on_progress=on_progress)
            if trace is not None:
                simulator.end()
        swaps = what_if_note(self.run.policies, is_replaced=engine.alternative.changes.policy is not None)
        ran = Ran(collector.outcome(), simulator.places, len(workload.requests) - simulator.num_ended)
        simulated = Simulated(
            name=name,
            description=engine.alternative.describe(),
            outcome=ran.outcome,
            num_outside=num_outside,
            notes=[*engine.notes, *([swaps] if swaps else [])],
            run_folder=str(trace.run_folder) if trace is not None else "",
        )
        return simulated, ran
