"""Runs a workload through a simulated engine: the core of `eventlm serve`, a virtual clock and a cost model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from eventlm.config.objectives import Objectives
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.engine.setup import EngineSetup, make_header, make_run_id
from eventlm.events import Event, Header
from eventlm.replay.cost.model import CostModel
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.simulate.engine import in_ranks
from eventlm.replay.simulate.simulator import Simulator, Subscriber
from eventlm.replay.simulate.summary import SimulationSummary, summarize
from eventlm.replay.simulate.timing import ModelledTiming
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.workload.incidents import for_engine
from eventlm.replay.workload.workload import Workload
from eventlm.system.system import real_system
from eventlm.types import OnProgress
from eventlm.worker.protocol import WorkerReady


class SimulationResult(Struct, frozen=True, kw_only=True):
    """The result of a simulation. workload_index: the index in the workload of each request that arrived, by its seq.
    run_folder: of its trace; "" if it was not recorded.
    """

    header: Header
    outcome: RunOutcome
    summary: SimulationSummary
    num_events: int
    workload_index: dict[int, int]
    run_folder: str = ""


def simulate(
    workload: Workload,
    setup: EngineSetup,
    cost: CostModel,
    *,
    predictor: Sequence[int],
    closed_loop: int = 0,
    objectives: Objectives | None = None,
    record: Path | str | None = None,
    subscribers: Sequence[Subscriber] = (),
    validate_every: int = 0,
    on_progress: OnProgress | None = None,
) -> SimulationResult:
    """Run a workload to its end.

    predictor: the coefficients for the scheduler. objectives: for requests without their own. record: a folder for the
    trace. validate_every: events between two checks of the core's invariants, and then also whether anything waits for
    nothing at the end; 0: no checks. `on_progress` gets how many requests have ended, and their total.

    Raises UsageError for blocks that cannot be split or joined to the engine's and for a swap to a policy that is not
    installed, LogWriteError if the trace cannot be
    written, InvariantError if the core breaks a rule of its own.
    """
    began_ns = time.monotonic_ns()
    cost = in_ranks(cost, setup.config.parallel)
    header = simulated_header(workload, setup, cost, predictor)
    if not setup.config.cache.prefix_cache:
        workload = _without_cache_reads(workload)
    core = Core(setup.core, setup.plugins, Predictor.from_coefficients(list(predictor)))
    num_replicas = setup.core.num_replicas
    collector = OutcomeCollector(objectives)
    trace = SimulatedTrace(record, header.run) if record is not None else None
    with trace or nullcontext():
        simulator = Simulator(
            header,
            core,
            workload,
            ModelledTiming(cost, setup.core),
            external_facts=for_engine(workload.incidents, num_replicas=num_replicas, policies=setup.plugins.policies),
            closed_loop=closed_loop,
            checkpoint_events=CHECKPOINT_EVENTS if trace is not None else 0,
            subscribers=[
                collector.see,
                *subscribers,
                *([_validator(core, validate_every)] if validate_every else []),
                *([trace.see] if trace is not None else []),
            ],
        )
        simulator.run(on_progress=on_progress)
        if validate_every:
            validate_liveness(core.state)
        simulator.end()
    outcome = collector.outcome()
    return SimulationResult(
        header=header,
        outcome=outcome,
        summary=summarize(
            outcome,
            num_replicas=num_replicas,
            num_unserved=len(workload.requests) - outcome.num_requests,
            wall_ns=time.monotonic_ns() - began_ns,
        ),
        num_events=core.next_seq,
        workload_index=simulator.workload_index,
        run_folder=str(trace.run_folder) if trace is not None else "",
    )


def simulated_header(workload: Workload, setup: EngineSetup, cost: CostModel, predictor: Sequence[int]) -> Header:
    """The header of a simulated run, which contains the cost model."""
    description: dict[str, Any] = {"workload": workload.source, "cost_model": msgspec.to_builtins(cost)}
    no_worker = WorkerReady(epoch=1, pid=0, host={"simulated": description})
    system = real_system()
    run, unix_start_ns = make_run_id(system), system.clock.unix_ns()
    return make_header(setup, run, 0, list(predictor), "cost model", no_worker, unix_start_ns=unix_start_ns)


def _validator(core: Core, validate_every: int) -> Subscriber:
    def see(event: Event) -> None:
        if event.s % validate_every == 0:
            validate(core.state)

    return see


def _without_cache_reads(workload: Workload) -> Workload:
    requests = []
    for request in workload.requests:
        scheduling = structs.replace(request.arrival.scheduling, skip_cache_read=True)
        requests.append(structs.replace(request, arrival=structs.replace(request.arrival, scheduling=scheduling)))
    return structs.replace(workload, requests=requests)
