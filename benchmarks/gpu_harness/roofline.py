"""The least time that a recorded run's steps could have taken on a device, and what was between them.

A step reads each weight once, reads the keys and values of all its contexts and writes those of its tokens, and
multiplies; its floor is the longer of the two, bytes at the device's copy bandwidth or FLOPs at its product rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from eventlm.bench.step.floor import ModelFigures, floor_ns, num_matrix_weights, shape_of, step_work, total
from eventlm.bench.step.machine_probe import Machine
from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived, Launched, StepCompleted
from eventlm.models.spec import DTYPE_BYTES, ModelSpec

NS = 1e-9


class Step(NamedTuple):
    """A step that ran. Times are the device's, in ns."""

    launch: Launched
    start_ns: int
    end_ns: int

    @property
    def only_decodes(self) -> int:
        """Its rows if it has no prompt's chunk, else 0."""
        return 0 if self.launch.chunks else len(self.launch.decodes)


def read_steps(run_folder: Path, *, num_before: int, num_requests: int) -> list[Step]:
    """The steps of a run of one replica that computed `num_requests` requests, in their order. `num_before` requests
    had ended before these came, and others may have come when they had.
    """
    return list(_steps(run_folder, range(num_before + 1, num_before + num_requests + 1)))


def _steps(run_folder: Path, wanted: range) -> Iterator[Step]:
    """wanted: how many requests must have come."""
    launches: dict[int, Launched] = {}
    num_requests = 0
    with LogReader(run_folder) as log:
        for line in log:
            if line.tag not in ("arrive", "launch", "done"):
                continue
            event = line.event()
            if isinstance(event, Arrived):
                num_requests += 1
            elif isinstance(event, Launched) and num_requests in wanted:
                launches[event.step] = event
            elif isinstance(event, StepCompleted) and (launch := launches.pop(event.step, None)) is not None:
                yield Step(launch, event.start_ns, event.end_ns)


def floor_seconds(config: ModelSpec, steps: Sequence[Step], machine: Machine, *, kv_element_bytes: int = 2) -> float:
    """The least time for all of the steps. Weights have two bytes each."""
    weights = num_matrix_weights(config)
    weight_bytes = {name: DTYPE_BYTES["bfloat16"] * number for name, number in weights.items()}
    kv_token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_element_bytes
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes)
    return sum(NS * floor_ns(total(step_work(model, shape_of(step.launch)).values()), machine) for step in steps)


class Gaps(NamedTuple):
    """Between steps that only decode and follow one another. Times are means in seconds; `idle`: the share of all time
    in which the device had no step.
    """

    num_steps: int
    idle: float
    period: float
    duration: float


def gaps(steps: Sequence[Step], *, num_rows: int) -> Gaps:
    """Of the steps with at least so many rows. Raises ValueError where there are fewer than two in a row."""
    pairs = [
        (before, after)
        for before, after in pairwise(steps)
        if before.only_decodes >= num_rows and after.only_decodes >= num_rows
    ]
    if not pairs:
        raise ValueError(f"no two steps that follow one another decode {num_rows} sequences")
    idle = sum(max(after.start_ns - before.end_ns, 0) for before, after in pairs)
    return Gaps(
        num_steps=len(pairs) + 1,
        idle=idle / sum(after.end_ns - before.end_ns for before, after in pairs),
        period=NS * statistics.mean(after.end_ns - before.end_ns for before, after in pairs),
        duration=NS * statistics.mean(after.end_ns - after.start_ns for _, after in pairs),
    )
