"""Run a workload through an engine that is not there: the core of `eventlm serve`, its clock, and a cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from eventlm.control.setup import EngineSetup, make_header, make_run_id
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.events import Event, Header, Launched, WorkerUp
from eventlm.replay.cost_model import CostModel
from eventlm.replay.simulated_trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.simulator import Simulator, Subscriber
from eventlm.replay.timing import ModelledTiming
from eventlm.replay.workload import Workload
from eventlm.worker.protocol import WorkerReady

OnProgress = Callable[[int, int], None]


class SimulationResult(Struct, frozen=True, kw_only=True):
    """What a simulation came to.

    num_unserved: requests that never arrived, because what they go on from never ended. wall_ns: what it took here.
    run_folder: where its trace lies, "" if none was asked for.
    """

    header: Header
    num_events: int
    num_steps: int
    num_unserved: int
    simulated_ns: int
    wall_ns: int
    run_folder: str = ""


class _StepCounter:
    """A subscriber."""

    def __init__(self) -> None:
        self.num_steps = 0

    def see(self, event: Event) -> None:
        self.num_steps += type(event) is Launched


def simulate(
    workload: Workload,
    setup: EngineSetup,
    cost: CostModel,
    *,
    predictor: Sequence[int],
    closed_loop: int = 0,
    record: Path | str | None = None,
    description: dict[str, Any] | None = None,
    subscribers: Sequence[Subscriber] = (),
    on_progress: OnProgress | None = None,
) -> SimulationResult:
    """Run a workload to its end.

    predictor: the coefficients that the scheduler goes by, as `predictor` in the configuration. record: a folder that
    gets the run's trace. description: goes into the header, to say what was simulated. `on_progress` gets how many
    requests have ended, and of how many.

    Raises UsageError for blocks that cannot be split or joined to the engine's, LogWriteError if the trace cannot be
    written.
    """
    began_ns = time.monotonic_ns()
    header = simulated_header(setup, predictor, description or {})
    workload = _without_cache_reads(workload) if not setup.config.cache.prefix_cache else workload
    core = Core(setup.core, setup.plugins, Predictor.from_coefficients(list(predictor)))
    num_replicas = setup.core.num_replicas
    counter = _StepCounter()
    trace = SimulatedTrace(record, header.run) if record is not None else None
    try:
        simulator = Simulator(
            header,
            core,
            workload,
            ModelledTiming(cost, num_replicas),
            incidents=[WorkerUp(replica=replica, epoch=1) for replica in range(num_replicas)],
            closed_loop=closed_loop,
            checkpoint_events=CHECKPOINT_EVENTS if trace is not None else 0,
            subscribers=[counter.see, *subscribers, *([trace.see] if trace is not None else [])],
        )
        simulator.run(on_progress=on_progress)
        simulator.end()
    finally:
        if trace is not None:
            trace.close()
    return SimulationResult(
        header=header,
        num_events=core.next_seq,
        num_steps=counter.num_steps,
        num_unserved=len(workload.requests) - simulator.num_ended,
        simulated_ns=core.state.now_ns,
        wall_ns=time.monotonic_ns() - began_ns,
        run_folder=str(trace.run_folder) if trace is not None else "",
    )


def simulated_header(setup: EngineSetup, predictor: Sequence[int], description: dict[str, Any]) -> Header:
    """The header of a run that no worker has seen."""
    no_worker = WorkerReady(epoch=1, pid=0, host={"simulated": description})
    return make_header(setup, make_run_id(), 0, list(predictor), "cost model", no_worker)


def _without_cache_reads(workload: Workload) -> Workload:
    requests = [
        structs.replace(request, arrival=structs.replace(request.arrival, skip_cache_read=True))
        for request in workload.requests
    ]
    return structs.replace(workload, requests=requests)
