"""Plug-ins that are bad in one way each, and runs under them: the report has to find the cause."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from eventlm.core.plugin import Batcher, Policy, ReplicaView, RequestView, Router, SequenceView, StepLoad
from eventlm.core.predictor import Predictor
from eventlm.events import Arrived
from eventlm.replay.simulate.engine import SimulatedSet
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from tests.replay.made_workloads import COST, PREDICTOR, make_engine

BLOCK_SIZE = 16


class StarvingKey(Policy, frozen=True, kw_only=True):
    """One service class comes after everybody else, however long it has waited."""

    static: ClassVar[bool] = True

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        return [s.arrival_ns + (1 << 50 if s.service_class == "reports" else 0) for s in sequences]


class StallingBatcher(Batcher, frozen=True, kw_only=True):
    """No prompt goes on while anybody decodes."""

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        return 0 if load.num_decodes else min(max_tokens, 16)


class OscillatingEviction(Policy, frozen=True, kw_only=True):
    """Whoever waits is more urgent than whoever runs, so they take turns at evicting each other."""

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        return [s.arrival_ns - 2 * now_ns for s in sequences]

    def eviction_margin(self) -> int | None:
        return 0


class OneSidedRouter(Router, frozen=True, kw_only=True):
    """All requests go to the first replica."""

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        return replicas[0].index


class CacheHostileRouter(Router, frozen=True, kw_only=True):
    """A request goes where least of its prompt is cached."""

    reads_prefixes: ClassVar[bool] = True

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        return min(replicas, key=lambda r: (r.prefix_tokens, r.num_waiting + r.num_running, r.index)).index


class Planted(NamedTuple):
    """A run: options of its engine, its load in requests a second, and the finding that it must have."""

    options: dict[str, Any]
    rate: float
    kind: str
    culprit: str
    num_blocks: int = 1024


def _local(name: str) -> dict[str, str]:
    return {"type": f"tests.look.planted:{name}"}


PLANTED = {
    "starving_key": Planted({"policy": _local("StarvingKey"), "max_num_seqs": 4}, 46, "starvation", "StarvingKey"),
    "stalling_batcher": Planted({"batcher": _local("StallingBatcher")}, 8, "stall_with_free_blocks", "StallingBatcher"),
    "oscillating_eviction": Planted(
        {"policy": _local("OscillatingEviction"), "max_num_seqs": 4},
        40,
        "preemption_thrash",
        "OscillatingEviction",
        num_blocks=80,
    ),
    "one_sided_router": Planted(
        {"router": _local("OneSidedRouter"), "replicas": 2, "max_num_seqs": 4}, 46, "imbalance", "OneSidedRouter"
    ),
    "cache_hostile_router": Planted(
        {"router": _local("CacheHostileRouter"), "replicas": 3}, 10, "lost_hits", "CacheHostileRouter"
    ),
}


def make_load(seed: int, *, rate: float, num_requests: int = 400) -> Workload:
    """Conversations of some turns and single requests of two service classes, Poisson arrivals."""
    draw = random.Random(seed)
    requests: list[WorkloadRequest] = []
    arrival_s = 0.0
    next_name = 1
    histories: list[list[int]] = []
    for _ in range(num_requests):
        arrival_s += draw.expovariate(rate)
        is_report = draw.random() < 0.1
        is_turn = not is_report and histories and draw.random() < 0.6
        blocks = list(draw.choice(histories[-12:])) if is_turn else []
        fresh = draw.randrange(2, 12)
        blocks = [*blocks, *range(next_name, next_name + fresh)][:24]
        next_name += fresh
        if not is_report:
            histories.append(blocks)
        prompt_tokens = len(blocks) * BLOCK_SIZE + draw.randrange(1, BLOCK_SIZE)
        num_tokens = draw.randrange(8, 64)
        requests.append(
            WorkloadRequest(
                arrival=Arrived(
                    prompt_tokens=prompt_tokens,
                    blocks=blocks,
                    max_tokens=num_tokens,
                    scheduling=SchedulingParams(model="", service_class="reports" if is_report else "chat"),
                ),
                arrival_ns=round(arrival_s * 1e9),
                outputs=[SequenceOutput(num_tokens=num_tokens, reason="length")],
            )
        )
    return Workload(source=f"load {seed}", requests=requests, block_size=BLOCK_SIZE, first_free_name=next_name)


def record_load(folder: Path, workload: Workload, options: dict[str, Any], *, num_blocks: int = 1024) -> Path:
    """Simulate it and record the run; its folder."""
    engine = make_engine(num_blocks=num_blocks, max_model_len=1024, **options)
    return Path(simulate(workload, engine, COST, predictor=PREDICTOR, record=folder).run_folder)


def record_sets(folder: Path, **options: Any) -> Path:
    """A run of two replicasets, `a` of the model `ma` with little to do and `b` of `mb` with much; its folder. options:
    of the second.
    """
    quiet, busy = make_load(1, rate=4, num_requests=40), make_load(2, rate=46)
    # Names of blocks that the sets have in common do no harm: each has its own cache.
    requests = [
        structs.replace(each, arrival=structs.replace(each.arrival, replicaset=number))
        for number, load in enumerate((quiet, busy))
        for each in load.requests
    ]
    requests.sort(key=lambda each: each.arrival_ns)
    workload = structs.replace(busy, source="two loads", requests=requests)
    first, second = (
        structs.replace(engine, name=name, core=structs.replace(engine.core, models=[f"m{name}"]))
        for name, engine in (
            ("a", make_engine(num_blocks=1024, max_model_len=1024, max_num_seqs=64)),
            ("b", make_engine(num_blocks=1024, max_model_len=1024, **options)),
        )
    )
    others = [SimulatedSet(second, PREDICTOR, COST)]
    return Path(simulate(workload, first, COST, predictor=PREDICTOR, others=others, record=folder).run_folder)


def record_planted(folder: Path, name: str) -> Path:
    """One of the bad runs."""
    planted = PLANTED[name]
    return record_load(folder, make_load(7, rate=planted.rate), planted.options, num_blocks=planted.num_blocks)
