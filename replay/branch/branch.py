"""Branches: what would have become of the rest of a run.

    point = find_point("runs/latest", BranchPlace(event=1042))
    found = branch("runs/latest", point, Changes(policy={"type": "edf"}))

The core is taken as it was at a point of the run, between two drains. From there another policy, batcher, router or
limit decides, over the requests that were live and those that arrived later. As in a what-if, the null test comes
first: with nothing changed and the recorded durations the rest of the run must come out as it was. The baseline is the
unchanged branch with modelled durations, and its distance from the record goes into the error bars.

A branch is written as a trace that begins with a snapshot, so every tool reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.config.objectives import Objectives
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import UsageError
from eventlm.events import Gap, Launched
from eventlm.formatting import counted
from eventlm.replay.branch.engine import (
    BranchEngine,
    branch_header,
    build_branch_engine,
    facts_after,
    left_out_swaps,
)
from eventlm.replay.branch.pairing import RequestPair, pair_requests
from eventlm.replay.branch.point import BranchPoint
from eventlm.replay.cost.backend_model import AnyCost
from eventlm.replay.cost.fit import FitReport
from eventlm.replay.cost.recorded_steps import RecordedShapes, RecordedStep
from eventlm.replay.outcome import OutcomeCollector
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.simulator import Simulator
from eventlm.replay.simulate.timing import ModelledTiming, timings
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.simulate.under_way import UnderWay, remaining_work
from eventlm.replay.what_if.compare import Ran, compare
from eventlm.replay.what_if.costs import NUM_DRAWS, LooksAtShapes, draw_costs, given_costs, shapes_of_sets
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.what_if.what_if import NullTestError, OnStage, Simulated, WhatIfResult, sets_found, stages_of
from eventlm.replay.workload.closed_loop import find_closed_loop
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from eventlm.replay.workload.unknown import draw_unknown
from eventlm.replay.workload.workload import Workload
from eventlm.types import OnProgress


class BranchResult(Struct, frozen=True, kw_only=True):
    """A branch, and what it is compared with from event `s` of the run on, which is at `now_ns`.

    num_live: requests that were live there; num_later: that arrived afterwards. what_if: the figures, with the branch
    as the only alternative. pairs: each sequence that ended in the rest of the run, in the branch, or in both, in the
    order of arrival.
    """

    s: int
    now_ns: int
    num_live: int
    num_later: int
    what_if: WhatIfResult
    pairs: list[RequestPair]


def branch(
    path: Path | str,
    point: BranchPoint,
    changes: Changes | None = None,
    *,
    run: RecordedRun | None = None,
    objectives: Objectives | None = None,
    cost_model: AnyCost | None = None,
    cost_models: Mapping[str, AnyCost] | None = None,
    num_draws: int = NUM_DRAWS,
    output: Path | str | None = None,
    strict: bool = False,
    on_progress: OnStage | None = None,
) -> BranchResult:
    """Run the rest of a recorded run, from a point of it on, under changes.

    run: the run, if it has been read. objectives: what requests without their own are measured by. cost_model: in place
    of one fitted to the run; cost_models: the same of single replicasets, by their names. num_draws: how many times
    each engine runs at most, with other draws of what the run does not show; with one, error bars have no spread.
    output: a folder that gets the branch's trace.

    Raises UsageError for changes that cannot be made there and where nothing is left to run, NullTestError,
    LogWriteError if the trace cannot be written, and what LogReader raises.
    """
    changes = changes or Changes()
    stage = stages_of(on_progress)
    with LogReader(path) as log:
        given = given_costs(log.header, cost_model, cost_models or {})
        found = build_branch_engine(log.header, point, changes)
        unchanged = Changes(trust_local_plugins=changes.trust_local_plugins)
        baseline = build_branch_engine(log.header, point, unchanged)
    if output is not None:
        SimulatedTrace.check_folder(output)
    if run is None:
        run = read_run(path, strict=strict, on_progress=stage("reading"))
    rest = _rest_of_run(run, point, path, objectives)
    num_live = len(rest.state.requests)
    null = null_test(run, path, core=baseline.new_core(point))
    if null.difference:
        raise NullTestError(
            f"{path}: the null test failed, so nothing can be said of a branch: repeated with its own durations, the "
            f"rest of the run differs at {null.difference} (`eventlm replay` has more)"
        )
    recorded = _recorded(rest, path)
    costs, fits = draw_costs(run, given, follows_run=True)
    costs = costs[:num_draws]
    base, base_ran = rest.simulate("baseline", baseline, costs, None, stage("simulating the rest of the run"))
    unpaced_ran: list[Ran] = []
    if any(isinstance(fit, FitReport) for fit in fits):
        unpaced = draw_costs(run, given, follows_run=False)[0][:num_draws]
        _, unpaced_ran = rest.simulate("baseline", baseline, unpaced, None, stage("simulating it at an even pace"))
    simulated, ran = rest.simulate("branch", found, costs, output, stage("simulating the branch"))
    return BranchResult(
        s=point.s,
        now_ns=point.now_ns,
        num_live=num_live,
        num_later=len(rest.work.requests) - num_live,
        what_if=WhatIfResult(
            path=str(path),
            header=run.header,
            null=null,
            sets=sets_found(run, costs[0], fits),
            objectives=objectives,
            recorded=recorded.outcome,
            baseline=base,
            alternatives=[simulated],
            comparison=compare(rest.work, recorded, base_ran, [ran], unpaced=unpaced_ran),
            closed_loop=None,
            notes=_notes(run),
            warnings=run.warnings,
        ),
        pairs=pair_requests(rest.work, recorded, ran[0]),
    )


class _Rest(NamedTuple):
    """What remains of a run after a point. work: as far as the run shows it."""

    run: RecordedRun
    point: BranchPoint
    objectives: Objectives | None
    state: StateSnapshot
    launches: list[Launched]
    work: Workload
    shapes: list[RecordedShapes]

    def collector(self) -> OutcomeCollector:
        """One that begins at the point."""
        collector = OutcomeCollector(self.objectives)
        collector.take_up(self.run.header, self.state, self.launches)
        return collector

    def simulate(
        self,
        name: str,
        found: BranchEngine,
        costs: Sequence[Sequence[AnyCost]],
        folder: Path | str | None,
        on_progress: OnProgress | None,
    ) -> tuple[Simulated, list[Ran]]:
        """Run every draw of the work through an engine. The folder gets the trace of the first."""
        first, ran = self._simulate(name, found, costs[0], 0, folder, on_progress)
        others = [self._simulate(name, found, costs[draw], draw, None, on_progress)[1] for draw in range(1, len(costs))]
        return first, [ran, *others]

    def _simulate(
        self,
        name: str,
        found: BranchEngine,
        costs: Sequence[AnyCost],
        draw: int,
        folder: Path | str | None,
        on_progress: OnProgress | None,
    ) -> tuple[Simulated, Ran]:
        run, point = self.run, self.point
        header = branch_header(run, point, found, costs)
        shapes = LooksAtShapes(header, self.shapes)
        live = [request.arrival.s for request in self.state.requests]
        collector = self.collector()
        trace = SimulatedTrace(folder, header.run) if folder is not None else None
        with trace or contextlib.nullcontext():
            simulator = Simulator(
                header,
                found.new_core(point),
                remaining_work(draw_unknown(run.all_work, seed=draw), live, point.s),
                ModelledTiming(
                    timings(header.sets, costs),
                    on_shape=shapes.look,
                    start=self.state,
                    before=self._steps_before(),
                ),
                external_facts=facts_after(run, point, found),
                checkpoint_events=CHECKPOINT_EVENTS if trace is not None else 0,
                subscribers=[collector.see, *([trace.see] if trace is not None else [])],
                under_way=UnderWay(live, self.launches, run.fact_times_ns),
            )
            simulator.run(on_progress=on_progress)
            if trace is not None:
                simulator.end()
        outcome = collector.outcome()
        ran = Ran(
            outcome,
            simulator.workload_index,
            len(self.work.requests) - (outcome.num_requests - outcome.num_unfinished),
        )
        simulated = Simulated(
            name=name,
            description=found.engine.alternative.describe(),
            outcome=outcome,
            num_seen=shapes.num_seen,
            num_outside=shapes.num_outside,
            notes=[*found.engine.notes, *left_out_swaps(run, point, found)],
            run_folder=str(trace.run_folder) if trace is not None else "",
        )
        return simulated, ran

    def _steps_before(self) -> list[RecordedStep]:
        """The steps in flight at the point, and the last one of each replica before it."""
        in_flight = {(launched.replica, launched.epoch, launched.step) for launched in self.launches}
        last: dict[int, RecordedStep] = {}
        found = []
        for step in (*self.run.first_steps, *self.run.steps):
            if step.s <= self.point.s:
                last[step.replica] = step
            elif (step.replica, step.epoch, step.step) in in_flight:
                found.append(step)
        return [*last.values(), *found]


def _rest_of_run(run: RecordedRun, point: BranchPoint, path: Path | str, objectives: Objectives | None) -> _Rest:
    gap = next((each for each in run.markers if isinstance(each, Gap) and each.s > point.s), None)
    if gap is not None:
        raise UsageError(
            f"{path}: after event {point.s:,} the trace has a gap, events {gap.first:,} to {gap.last:,}, so it is not "
            "known what was still to do; branch after it"
        )
    state, work = point.state, run.all_work
    known = {request.s for request in work.requests}
    live = [request.arrival.s for request in state.requests]
    lost = [seq for seq in live if seq not in known]
    if lost:
        raise UsageError(
            f"{path}: {counted(len(lost), 'request')} under way at event {point.s:,} arrived in a gap of the trace or "
            f"before it, the first as event {lost[0]:,}; give the path of the segment that follows the gap"
        )
    work = remaining_work(work, live, point.s)
    if not work.requests:
        raise UsageError(f"{path}: after event {point.s:,} there is nothing left to do, so nothing can be branched")
    return _Rest(run, point, objectives, state, launches_in_flight(state), work, shapes_of_sets(run))


def _recorded(rest: _Rest, path: Path | str) -> Ran:
    """The rest of the run as it was."""
    collector = rest.collector()
    with LogReader(path) as log:
        for line in log.lines_from(rest.point.s + 1):
            collector.see(line.event())
    outcome = collector.outcome()
    return Ran(outcome, {each.s: index for index, each in enumerate(rest.work.requests)}, outcome.num_unfinished)


def _notes(run: RecordedRun) -> list[str]:
    loop = find_closed_loop(run.workload, run.ends_ns, num_rejected=run.num_rejected)
    if loop is None:
        return []
    return [
        f"the arrivals look like a closed loop of {counted(loop.num_clients, 'client')}, each of which sends its next "
        "request when its last one has ended; in a branch they come at the recorded times, so it cannot show another "
        "throughput"
    ]
