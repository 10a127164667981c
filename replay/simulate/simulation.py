"""Runs a workload through a simulated engine: the core of `eventlm serve`, a virtual clock and a cost model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from msgspec import Struct, structs

from eventlm.config.objectives import Objectives
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.engine.setup import EngineSetup, StartedSet, make_header, make_run_id
from eventlm.events import Event, Header
from eventlm.replay.cost.backend_model import AnyCost, BackendsCost, describe_costs
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.simulate.backend_sets import for_backends, started_backends
from eventlm.replay.simulate.engine import SimulatedSet, in_ranks
from eventlm.replay.simulate.simulator import Simulator, Subscriber
from eventlm.replay.simulate.summary import SimulationSummary, summarize
from eventlm.replay.simulate.timing import ModelledTiming, SetTiming
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
    cost: AnyCost,
    *,
    predictor: Sequence[int],
    others: Sequence[SimulatedSet] = (),
    closed_loop: int = 0,
    objectives: Objectives | None = None,
    record: Path | str | None = None,
    subscribers: Sequence[Subscriber] = (),
    validate_every: int = 0,
    on_progress: OnProgress | None = None,
) -> SimulationResult:
    """Run a workload to its end.

    predictor: the coefficients for the scheduler. others: the further replicasets; requests have their numbers, from 1
    on. objectives: for requests without their own. record: a folder for the
    trace. validate_every: events between two checks of the core's invariants, and then also whether anything waits for
    nothing at the end; 0: no checks. `on_progress` gets how many requests have ended, and their total.

    Raises UsageError for blocks that cannot be split or joined to the engine's and for a swap to a policy that is not
    installed, LogWriteError if the trace cannot be
    written, InvariantError if the core breaks a rule of its own.
    """
    began_ns = time.monotonic_ns()
    sets = [SimulatedSet(setup, list(predictor), cost), *others]
    sets = [
        each
        if isinstance(each.cost, BackendsCost)
        else each._replace(cost=in_ranks(each.cost, each.setup.config.parallel))
        for each in sets
    ]
    header = simulated_header(workload, sets)
    workload = for_backends(workload, [each.setup.forwards for each in sets])
    workload = _without_cache_reads(workload, [each.setup.config.cache.prefix_cache for each in sets])
    first, *more = [
        SetParts(each.setup.core, each.setup.plugins, Predictor.from_coefficients(each.predictor)) for each in sets
    ]
    core = Core(*first, more)
    collector = OutcomeCollector(objectives)
    trace = SimulatedTrace(record, header.run) if record is not None else None
    with trace or nullcontext():
        simulator = Simulator(
            header,
            core,
            workload,
            ModelledTiming([SetTiming(each.cost, each.setup.core) for each in sets]),
            external_facts=for_engine(workload.incidents, [first, *more], started_backends(sets)),
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
            header=header,
            num_unserved=len(workload.requests) - outcome.num_requests,
            wall_ns=time.monotonic_ns() - began_ns,
        ),
        num_events=core.next_seq,
        workload_index=simulator.workload_index,
        run_folder=str(trace.run_folder) if trace is not None else "",
    )


def simulated_header(workload: Workload, sets: Sequence[SimulatedSet]) -> Header:
    """The header of a simulated run, which contains the cost models."""
    costs = describe_costs([each.setup.name for each in sets], [each.cost for each in sets])
    no_worker = WorkerReady(epoch=1, pid=0, host={"simulated": {"workload": workload.source, **costs}})
    system = real_system()
    run, unix_start_ns = make_run_id(system), system.clock.unix_ns()
    first, *others = [StartedSet(each.setup, each.predictor, no_worker) for each in sets]
    return make_header(
        first.setup, run, 0, first.predictor, "cost model", no_worker, unix_start_ns=unix_start_ns, others=others
    )


def _validator(core: Core, validate_every: int) -> Subscriber:
    def see(event: Event) -> None:
        if event.s % validate_every == 0:
            validate(core.state)

    return see


def _without_cache_reads(workload: Workload, have_caches: Sequence[bool]) -> Workload:
    """The requests of replicasets without a prefix cache do not read it."""
    if all(have_caches):
        return workload
    requests = []
    for request in workload.requests:
        if not have_caches[request.arrival.replicaset]:
            scheduling = structs.replace(request.arrival.scheduling, skip_cache_read=True)
            request = structs.replace(request, arrival=structs.replace(request.arrival, scheduling=scheduling))
        requests.append(request)
    return structs.replace(workload, requests=requests)
