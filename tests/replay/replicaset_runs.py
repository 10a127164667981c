"""Recorded runs of engines with several replicasets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.simulate.engine import SimulatedSet
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import Workload
from eventlm.system.system import real_system
from tests.replay.made_workloads import COST, PREDICTOR, make_engine, make_workload
from tests.simulation import Simulation
from tests.workload import Chaos, Machine, draw_machine, with_sets

#: Steps of the second replicaset take twice as long.
SLOW = LinearCost(**{name: 2 * getattr(COST, name) for name in ("base_ps", "prefill_ps", "decode_ps", "context_ps")})


def sets_of(seed: int) -> Machine:
    """A machine with two or three replicasets that have nothing in common, whose rows produce one token each."""
    machine = with_sets(draw_machine(random.Random(seed), seed), seed)
    return _one_token(machine)._replace(others=tuple(map(_one_token, machine.others)))


def _one_token(machine: Machine) -> Machine:
    return machine._replace(core=structs.replace(machine.core, max_tokens_per_row=1))


def record_sets(folder: Path, seed: int, *, segment_bytes: int = 0) -> Path:
    """A random workload on such a machine, with all that may go wrong."""
    with LogWriter(real_system(), folder, f"sets-{seed}", segment_bytes=segment_bytes) as writer:
        Simulation(seed, writer=writer, chaos=Chaos(recoveries=seed % 3), check_every=0, machine=sets_of(seed)).run()
        return writer.run_folder


def two_models(seed: int, *, num_requests: int = 60) -> Workload:
    """A workload whose requests are for one model or another; turns stay with theirs."""
    workload = make_workload(seed, num_requests=num_requests)
    numbers: list[int] = []
    for index, request in enumerate(workload.requests):
        numbers.append(numbers[request.parent] if request.parent >= 0 else index % 2)
    requests = [
        structs.replace(request, arrival=structs.replace(request.arrival, replicaset=number))
        for request, number in zip(workload.requests, numbers, strict=True)
    ]
    return structs.replace(workload, requests=requests)


def made_sets(folder: Path, seed: int = 1, *, num_requests: int = 60, **options: Any) -> Path:
    """A run of two replicasets, `main` of the model `made` and `small` of `other`, which has 2 replicas, blocks of half
    the size and slower steps. options: of the second.
    """
    first = structs.replace(make_engine(), name="main")
    second = make_engine(**({"replicas": 2, "block_size": 8, "policy": "edf", "extra_policy": ["lrs"]} | options))
    second = structs.replace(second, name="small", core=structs.replace(second.core, models=["other"]))
    found = simulate(
        two_models(seed, num_requests=num_requests),
        first,
        COST,
        predictor=PREDICTOR,
        others=[SimulatedSet(second, SLOW.coefficients(), SLOW)],
        record=folder,
    )
    return Path(found.run_folder)
