"""What-if: a recorded run's work on another engine, or on the same one at other times.

    found = what_if("runs/latest", [Alternative(changes=Changes(policy={"type": "edf"}))])

Each stage supports the next. The null test repeats the run with its own durations and must come out as recorded. The
baseline repeats it with modelled durations; its distance from the record goes into all error bars. If these durations
follow the run's own pace, the baseline runs again with durations that do not, and the larger error counts. Then each
alternative runs with the model of the baseline. Each engine runs once for each draw of what the run does not show:
unknown lengths, how long clients would have waited, and the durations that another run would have had. All engines run
the core itself; no policy gets a length that the engine did not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, structs

from eventlm.bus.log_reader import LogReader
from eventlm.config.objectives import Objectives
from eventlm.errors import EventLMError, ExitCode, UsageError
from eventlm.events import Arrived, Gap, Header, ReplicasetRecord
from eventlm.formatting import counted
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.cost.fit import FitReport
from eventlm.replay.cost.recorded_steps import RecordedShapes
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.simulator import Simulator
from eventlm.replay.simulate.timing import ModelledTiming, timings
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.what_if.compare import Comparison, Ran, compare
from eventlm.replay.what_if.costs import Fit, LooksAtShapes, draw_costs, given_costs, shapes_of_sets
from eventlm.replay.what_if.engine import (
    Alternative,
    AlternativeEngine,
    build_engine,
    external_facts_of,
    names,
    simulated_header,
)
from eventlm.replay.what_if.null_test import NullResult, null_test
from eventlm.replay.workload.closed_loop import ClosedLoop, find_closed_loop
from eventlm.replay.workload.recorded_policies import PolicySpan, what_if_note
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from eventlm.replay.workload.unknown import draw_unknown
from eventlm.replay.workload.workload import Workload
from eventlm.types import OnProgress, TimeWindow

#: What is done, how much of it, and of how much.
OnStage = Callable[[str, int, int], None]


class NullTestError(EventLMError):
    """The run cannot be repeated, so no alternative can be simulated."""

    exit_code = ExitCode.DIFFERENT


class Simulated(Struct, frozen=True, kw_only=True):
    """A simulated run.

    num_seen: its steps, and attempts at other servers; num_outside: those that lie outside those of the run.
    run_folder: where its trace lies; "" if none was asked for. All this is of the first draw.
    """

    name: str
    description: str
    outcome: RunOutcome
    num_seen: int
    num_outside: int
    notes: list[str]
    run_folder: str = ""


class SetFound(Struct, frozen=True, kw_only=True):
    """What was found of a replicaset. fit: how good the cost model is; None for one that was given."""

    record: ReplicasetRecord
    policies: list[PolicySpan]
    cost: AnyCost
    fit: Fit | None


class WhatIfResult(Struct, frozen=True, kw_only=True):
    """Everything that was found. null: None where the null test could not be made, and then `notes` say why.

    sets: of each replicaset the policies that it had, its cost model and how good that is. closed_loop: the one that
    the run's arrivals look like, if any.
    """

    path: str
    header: Header
    null: NullResult | None
    sets: list[SetFound]
    objectives: Objectives | None
    recorded: RunOutcome
    baseline: Simulated
    alternatives: list[Simulated]
    comparison: Comparison
    closed_loop: ClosedLoop | None
    notes: list[str]
    warnings: list[str]


def what_if(
    path: Path | str,
    alternatives: Sequence[Alternative],
    *,
    objectives: Objectives | None = None,
    cost_model: AnyCost | None = None,
    cost_models: Mapping[str, AnyCost] | None = None,
    output: Path | str | None = None,
    window: TimeWindow | None = None,
    strict: bool = False,
    trust_local_plugins: bool = False,
    on_progress: OnStage | None = None,
) -> WhatIfResult:
    """Ask what alternatives would have done with a run's work.

    objectives: what requests without their own are measured by. cost_model: in place of one fitted to the run;
    cost_models: the same of single replicasets, by their names. output: a folder that gets the trace of each
    alternative. window: compare only the requests that arrived in it; the engines still run the whole work, for what
    came before and after takes part. strict: a torn last line is an error.

    Raises UsageError for an alternative that makes no sense or a run without work, NullTestError, LogWriteError if a
    trace cannot be written, and what LogReader raises.
    """
    stage = stages_of(on_progress)
    with LogReader(path) as log:
        header = log.header
    # A usage error need not wait for the run to be read.
    engines = [build_engine(header, alternative) for alternative in alternatives]
    if output is not None:
        SimulatedTrace.check_folder(output)
    counts = None if window is None else (lambda arrival: window.has(arrival.ts))
    collector = OutcomeCollector(objectives, counts=counts)
    run = read_run(path, strict=strict, subscribers=[collector.see], on_progress=stage("reading"))
    if not run.workload.requests:
        raise UsageError(
            f"{path}: no request arrived in it, so there is no work for another engine; `eventlm trace ls` lists "
            "other runs"
        )
    compared = _compared_places(run.workload, window)
    if not compared:
        raise UsageError(f"{path}: no request arrived in the window, so there is nothing to compare")
    null, notes = _null_test(run, path, trust_local_plugins=trust_local_plugins)
    loop = find_closed_loop(run.workload, run.ends_ns, num_rejected=run.num_rejected)
    same = Alternative(
        changes=Changes(trust_local_plugins=trust_local_plugins), closed_loop=_baseline_loop(loop, alternatives)
    )
    notes += _load_notes(loop, alternatives, same)
    if window is not None:
        total = counted(len(run.workload.requests), "request")
        notes.append(f"the figures are of the {len(compared):,} of {total} that arrived in the window; all of them ran")
    follows_run = all(alternative.follows_run for alternative in alternatives)
    given = given_costs(header, cost_model, cost_models or {})
    costs, fits = draw_costs(run, given, follows_run=follows_run)
    workloads = [draw_unknown(run.workload, seed=seed) for seed in range(len(costs))]
    machine = _Machine(
        run, workloads, loop, costs, shapes_of_sets(run), objectives, compared, has_window=window is not None
    )
    baseline = build_engine(header, same)
    base, base_ran = machine.simulate("baseline", baseline, None, stage("simulating the baseline"))
    unpaced_ran: list[Ran] = []
    if follows_run and any(isinstance(fit, FitReport) for fit in fits):
        unpaced = machine._replace(costs=draw_costs(run, given, follows_run=False)[0])
        _, unpaced_ran = unpaced.simulate("baseline", baseline, None, stage("simulating it at an even pace"))
    simulated = [
        machine.simulate(name, engine, output, stage(f"simulating {name}"))
        for name, engine in zip(names(alternatives), engines, strict=True)
    ]
    recorded = collector.outcome()
    requests = [run.workload.requests[index] for index in compared]
    workload = structs.replace(run.workload, requests=requests)
    recorded_ran = Ran(recorded, {each.s: index for index, each in enumerate(requests)}, recorded.num_unfinished)
    return WhatIfResult(
        path=str(path),
        header=run.header,
        null=null,
        sets=sets_found(run, costs[0], fits),
        objectives=objectives,
        recorded=recorded,
        baseline=base,
        alternatives=[each for each, _ in simulated],
        comparison=compare(workload, recorded_ran, base_ran, [ran for _, ran in simulated], unpaced=unpaced_ran),
        closed_loop=loop,
        notes=notes,
        warnings=run.warnings,
    )


def _compared_places(workload: Workload, window: TimeWindow | None) -> dict[int, int]:
    """The indices of the requests that arrived in the window, or of all, each with its index among them."""
    chosen = [
        position for position, each in enumerate(workload.requests) if window is None or window.has(each.arrival.ts)
    ]
    return {position: index for index, position in enumerate(chosen)}


def _baseline_loop(loop: ClosedLoop | None, alternatives: Sequence[Alternative]) -> int:
    """The clients of the baseline: as many as the run had, if all alternatives have so many too; 0: recorded times."""
    is_same = loop is not None and all(alternative.closed_loop == loop.num_clients for alternative in alternatives)
    return loop.num_clients if loop is not None and is_same else 0


def _load_notes(loop: ClosedLoop | None, alternatives: Sequence[Alternative], baseline: Alternative) -> list[str]:
    """What to know of the arrivals before believing in a comparison."""
    loads = {(alternative.closed_loop, alternative.speed_up_ppm) for alternative in alternatives}
    if loads - {(baseline.closed_loop, baseline.speed_up_ppm)}:
        return [
            "the baseline is under the recorded load, the alternatives are not: compare them with each other, and ask "
            "for the recorded policy too if you ask for others"
        ]
    if loop is not None and not baseline.closed_loop:
        return [
            f"the arrivals look like a closed loop of {counted(loop.num_clients, 'client')}, each of which sends its "
            "next request when its last one has ended; at the recorded times no engine can show another throughput: "
            f"use --closed-loop {loop.num_clients}"
        ]
    return []


def sets_found(run: RecordedRun, costs: Sequence[AnyCost], fits: Sequence[Fit | None]) -> list[SetFound]:
    """What the result says of each replicaset. costs: of the first draw."""
    return [
        SetFound(record=record, policies=policies, cost=cost, fit=fit)
        for record, policies, cost, fit in zip(run.header.sets, run.policies, costs, fits, strict=True)
    ]


def swap_notes(run: RecordedRun, changes: Changes) -> list[str]:
    """How an alternative treats the policies that the run swapped at run time."""
    found = []
    for record, spans in zip(run.header.sets, run.policies, strict=True):
        note = what_if_note(spans, is_replaced=changes.of_set(record.name).policy is not None)
        if note:
            found.append(f"{record.name}: {note}" if len(run.policies) > 1 else note)
    return found


def stages_of(on_progress: OnStage | None) -> Callable[[str], OnProgress | None]:
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
            f"the run differs at {result.difference} (`eventlm replay` without changes has more)"
        )
    return result, []


class _Machine(NamedTuple):
    """What all simulations of a run share. workloads, costs: one for each draw of what the run does not show."""

    run: RecordedRun
    workloads: list[Workload]
    loop: ClosedLoop | None
    #: By draw and replicaset.
    costs: Sequence[Sequence[AnyCost]]
    shapes: list[RecordedShapes]
    objectives: Objectives | None
    #: Indices in the workload of the requests that are compared, with their indices among these.
    compared: dict[int, int]
    has_window: bool

    def simulate(
        self, name: str, engine: AlternativeEngine, folder: Path | str | None, on_progress: OnProgress | None
    ) -> tuple[Simulated, list[Ran]]:
        """Run every draw of the work through an engine. The folder gets the trace of the first."""
        first, ran = self._simulate(name, engine, folder, 0, on_progress)
        others = range(1, len(self.workloads))
        return first, [ran, *(self._simulate(name, engine, None, draw, on_progress)[1] for draw in others)]

    def _simulate(
        self, name: str, engine: AlternativeEngine, folder: Path | str | None, draw: int, on_progress: OnProgress | None
    ) -> tuple[Simulated, Ran]:
        alternative = engine.alternative
        header = simulated_header(self.run, engine, name, self.costs[draw])
        shapes = LooksAtShapes(header, self.shapes)
        workload = self.workloads[draw].sped_up(alternative.speed_up_ppm)
        loop = self.loop if self.loop is not None and self.loop.num_clients == alternative.closed_loop else None

        def counts(arrival: Arrived) -> bool:
            return simulator.workload_index[arrival.s] in self.compared

        collector = OutcomeCollector(self.objectives, counts=counts if self.has_window else None)
        trace = SimulatedTrace(folder, header.run) if folder is not None else None
        with trace or contextlib.nullcontext():
            simulator = Simulator(
                header,
                engine.rebuilt.new_core(),
                workload,
                ModelledTiming(timings(engine.sets, self.costs[draw]), on_shape=shapes.look),
                external_facts=external_facts_of(self.run, engine),
                closed_loop=alternative.closed_loop,
                pauses_ns=loop.shuffled(draw) if loop is not None else (),
                checkpoint_events=CHECKPOINT_EVENTS if trace is not None else 0,
                subscribers=[collector.see, *([trace.see] if trace is not None else [])],
            )
            simulator.run(on_progress=on_progress)
            if trace is not None:
                simulator.end()
        outcome = collector.outcome()
        indices = {s: self.compared[index] for s, index in simulator.workload_index.items() if index in self.compared}
        # Some of them may never have arrived: what they go on from did not end.
        ran = Ran(outcome, indices, len(self.compared) - (outcome.num_requests - outcome.num_unfinished))
        simulated = Simulated(
            name=name,
            description=alternative.describe(),
            outcome=ran.outcome,
            num_seen=shapes.num_seen,
            num_outside=shapes.num_outside,
            notes=[*engine.notes, *swap_notes(self.run, alternative.changes)],
            run_folder=str(trace.run_folder) if trace is not None else "",
        )
        return simulated, ran
