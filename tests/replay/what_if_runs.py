"""Runs to ask what-if of: simulated, so that their cost model is known exactly, and recorded like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived, Event
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.what_if.compare import Metric
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import WhatIfResult
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from tests.made_requests import make_arrival
from tests.replay.made_workloads import COST, MILLISECOND, PREDICTOR, make_engine, make_workload


def made_run(folder: Path, seed: int = 1, *, num_requests: int = 40, **options: Any) -> Path:
    """A run of a made workload: shared prefixes, samples, cancels, text ends, turns, deadlines."""
    workload = make_workload(seed, num_requests=num_requests)
    return run_of(folder, workload, **options)


def run_of(folder: Path, workload: Workload, **options: Any) -> Path:
    """A run of a workload, whose steps take what COST says."""
    found = simulate(workload, make_engine(**options), COST, predictor=PREDICTOR, record=folder)
    return Path(found.run_folder)


def requests_of(arrivals_ms: Sequence[float], *, prompt: int = 100, output: int = 10, **fields: Any) -> Workload:
    """Equal requests at these times; prompts that nobody shares."""
    requests = []
    size = 16
    for index, arrival_ms in enumerate(arrivals_ms):
        blocks = [1 + index * 100 + block for block in range(prompt // size)]
        requests.append(
            WorkloadRequest(
                arrival=make_arrival(prompt_tokens=prompt, max_tokens=output, blocks=blocks, model="", **fields),
                arrival_ns=round(arrival_ms * MILLISECOND),
                outputs=[SequenceOutput(num_tokens=output)],
            )
        )
    return Workload(source="made", requests=requests, block_size=size, first_free_name=1 << 20)


def slower(cost: LinearCost, percent: int) -> LinearCost:
    """A model whose steps take so much longer."""
    fields = ("base_ps", "prefill_ps", "decode_ps", "context_ps", "chunk_context_ps")
    return structs.replace(cost, **{name: getattr(cost, name) * (100 + percent) // 100 for name in fields})


def policy(name: str, **parameters: Any) -> Alternative:
    """Another policy."""
    return Alternative(changes=Changes(policy={"type": name} | parameters))


def metric_of(result: WhatIfResult, name: str) -> Metric:
    """A metric by its name."""
    return next(metric for metric in result.comparison.metrics if metric.name == name)


def events_of(folder: Path | str) -> list[Event]:
    """All events of a run."""
    with LogReader(Path(folder) / "trace.jsonl") as log:
        return [line.event() for line in log]


def arrivals_of(folder: Path | str) -> list[Arrived]:
    """The arrivals of a run."""
    return [event for event in events_of(folder) if isinstance(event, Arrived)]
