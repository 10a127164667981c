"""What recording costs: CPU time of the recorder's code over the run, and the run's wall time with and without it.

    python benchmarks/recording.py [--model FOLDER] [--clients 8] [--requests 32] [--rounds 3]

Closed loop against the engine itself (no HTTP), interleaved rounds with and without a trace. The recorder's code is
what would not run without it: encoding of the events that no worker needs, chaining, and write(2), once a step. A step
of milliseconds leaves the caches cold, so a bare write(2) in the same rhythm is timed beside it as the floor. Nothing
else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from eventlm.bus.log_writer import LogWriter
from eventlm.config import Config, ModelConfig, RecordConfig
from eventlm.control.driver import Driver
from eventlm.control.engine import InferenceEngine
from eventlm.control.request import EngineRequest
from eventlm.control.setup import make_setup
from eventlm.events import Event
from eventlm.models.pull import pull
from eventlm.sampler_params import SamplerParams

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64


class Round(NamedTuple):
    """One run of the workload."""

    wall_s: float
    recorder_s: float
    per_drain_us: list[float]
    num_bytes: int


class Meter:
    """Times the recorder's code within a driver, drain by drain (CPU time of the thread)."""

    def __init__(self, driver: Driver) -> None:
        self.per_drain_us: list[float] = []
        write = driver._write

        def timed(writer: LogWriter, events: list[Event]) -> None:
            start = time.thread_time_ns()
            write(writer, events)
            self.per_drain_us.append((time.thread_time_ns() - start) / 1000)

        driver._write = timed  # type: ignore[method-assign]


def bare_writes(num_bytes: int, pause_s: float) -> list[float]:
    """The floor: microseconds of CPU time of one bare write(2) of a step's bytes, after a pause as long as a step's."""
    times = []
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(200):
            time.sleep(pause_s)
            start = time.thread_time_ns()
            file.write(b"x" * num_bytes)
            times.append((time.thread_time_ns() - start) / 1000)
    return sorted(times)


async def run(model: str, folder: Path | None, num_clients: int, num_requests: int) -> Round:
    """One engine, one workload."""
    config = Config(model=ModelConfig(model=model), record=RecordConfig(record=str(folder or ""), validate_every=0))
    engine = InferenceEngine(make_setup(config, model=model, model_name="m", num_blocks=4096, max_model_len=2048))
    await engine.start()
    assert engine._driver is not None
    meter = Meter(engine._driver)
    pending = list(range(num_requests))

    async def client() -> None:
        while pending:
            number = pending.pop()
            prompt = [5 + (number * 7919 + place * 104_729) % 1000 for place in range(PROMPT_TOKENS)]
            params = SamplerParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            (handle,) = await engine.submit([EngineRequest(model="m", prompt_token_ids=prompt, params=params)])
            async for _ in handle:
                pass

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    wall_s = time.perf_counter() - start
    num_bytes = engine._writer.num_bytes if engine._writer is not None else 0
    await engine.stop()
    return Round(wall_s, sum(meter.per_drain_us) / 1e6, meter.per_drain_us, num_bytes)


def quantile(ordered: list[float], percent: int) -> float:
    """The value below which `percent` of an ordered list lies."""
    return ordered[len(ordered) * percent // 100]


def main() -> None:
    """Print one line a round, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or `fake`; the default model if left out")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or str(pull())
    recorded, plain = [], []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            recorded.append(uvloop.run(run(model, Path(folder), arguments.clients, arguments.requests)))
        plain.append(uvloop.run(run(model, None, arguments.clients, arguments.requests)))
        print(f"round {number + 1}: {recorded[-1].wall_s:.2f} s with a trace, {plain[-1].wall_s:.2f} s without")
    drains = sorted(us for result in recorded for us in result.per_drain_us)
    share = sum(r.recorder_s for r in recorded) / sum(r.wall_s for r in recorded)
    num_bytes = sum(r.num_bytes for r in recorded) // len(drains)
    floor = bare_writes(num_bytes, sum(r.wall_s for r in recorded) / len(drains))
    print(f"recorder CPU: {share:.3%} of run time, {num_bytes} bytes a step")
    print(f"a step: median {quantile(drains, 50):.0f} us, p99 {quantile(drains, 99):.0f} us")
    print(f"a bare write(2) in this rhythm: median {quantile(floor, 50):.0f} us, p99 {quantile(floor, 99):.0f} us")
    with_s, without_s = (statistics.median(r.wall_s for r in results) for results in (recorded, plain))
    print(f"wall time, medians: {with_s:.2f} s with, {without_s:.2f} s without, ratio {with_s / without_s:.3f}")


if __name__ == "__main__":
    main()
