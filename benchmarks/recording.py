"""What recording costs: CPU time of the recorder's code over the run, and the run's wall time with and without it.

    python benchmarks/recording.py [--model FOLDER] [--clients 8] [--requests 32] [--rounds 3]

Closed loop against the engine itself (no HTTP), interleaved rounds with a trace, with each `record_lag` and
`record_sync`, with a spool (`recover`), and without.
The recorder's code is what would not run without it: encoding of the events that no worker needs, chaining, and
write(2), once a step. A step of milliseconds leaves the caches cold, so a bare write(2) in the same rhythm is timed
beside it as the floor. Clients wait from when a step's events are encoded until they are written. Nothing else should
run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import uvloop
from msgspec import structs

from eventlm.bus.recorder import Effect, Recorder, ThreadedRecorder
from eventlm.config import Config, ModelConfig, RecordConfig
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import Request, Submission
from eventlm.engine.setup import make_setup
from eventlm.events import Event
from eventlm.models.fetch.pull import pull
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
MODES: dict[str, Any] = {
    "wait": {},
    "gap": {"record_lag": "gap"},
    "interval": {"record_sync": "interval"},
    "group": {"record_sync": "group"},
    "recover memory": {"recover": "memory", "record_segment": "8MiB"},
    "recover DIR, group": {"recover": "spool", "record_segment": "8MiB", "record_sync": "group"},
}


class Meter:
    """Times the recorder's code within an engine core, drain by drain, in microseconds: CPU time in the loop, CPU time
    in the thread if there is one, and how long effects waited (wall time).
    """

    def __init__(self, engine_core: EngineCore) -> None:
        self.loop_us: list[float] = []
        self.thread_us: list[float] = []
        self.waited_us: list[float] = []
        self._leave_ns = 0
        write = engine_core._write

        def timed(recorder: Recorder, events: list[Event], leave: Effect) -> None:
            begin, start, self._leave_ns = time.perf_counter_ns(), time.thread_time_ns(), 0

            def timed_leave() -> None:
                self.waited_us.append((time.perf_counter_ns() - begin) / 1000)
                leave_start = time.thread_time_ns()
                leave()
                self._leave_ns += time.thread_time_ns() - leave_start

            write(recorder, events, timed_leave)
            self.loop_us.append((time.thread_time_ns() - start - self._leave_ns) / 1000)

        engine_core._write = timed  # type: ignore[method-assign]
        if isinstance(engine_core._recorder, ThreadedRecorder):
            self._watch_thread(engine_core._recorder)

    def _watch_thread(self, recorder: ThreadedRecorder) -> None:
        write_batch = recorder._write_batch

        def timed(batch: Any) -> None:
            start = time.thread_time_ns()
            write_batch(batch)
            self.thread_us.append((time.thread_time_ns() - start) / 1000)

        recorder._write_batch = timed  # type: ignore[method-assign]


class Round(NamedTuple):
    """One run of the workload."""

    wall_s: float
    meter: Meter
    num_bytes: int


def bare_writes(num_bytes: int, pause_s: float) -> list[float]:
    """The floor: microseconds of CPU time of one bare write(2) of a step's bytes, after a pause as long as a step's."""
    times = []
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(200):
            time.sleep(pause_s)
            start = time.thread_time_ns()
            file.write(b"x" * num_bytes)
            times.append((time.thread_time_ns() - start) / 1000)
    return times


async def run(model: str, record: RecordConfig, num_clients: int, num_requests: int) -> Round:
    """One engine, one workload."""
    config = Config(model=ModelConfig(model=model), record=record)
    engine = InferenceEngine(
        make_setup(config, model=model, model_name="m", num_blocks=4096, max_model_len=2048), real_system()
    )
    await engine.start()
    assert engine._engine_core is not None
    meter = Meter(engine._engine_core)
    pending = list(range(num_requests))

    async def client() -> None:
        while pending:
            number = pending.pop()
            prompt = [5 + (number * 7919 + index * 104_729) % 1000 for index in range(PROMPT_TOKENS)]
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            request = Request(prompt_token_ids=prompt, sampling=params, scheduling=SchedulingParams(model="m"))
            submission = Submission(reply_id=f"reply-{number}", is_resumable=bool(record.recover))
            (handle,) = await engine.submit([request], submission=submission)
            async for _ in handle:
                pass
            engine.leave(submission.reply_id, 0)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    wall_s = time.perf_counter() - start
    recorder = engine.metrics().recorder
    num_bytes = recorder.num_bytes if recorder is not None else 0
    await engine.stop()
    return Round(wall_s, meter, num_bytes)


def quantile(ordered: list[float], percent: int) -> float:
    """The value below which `percent` of an ordered list lies."""
    return ordered[len(ordered) * percent // 100]


def main() -> None:
    """Run all rounds, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or `fake`; the default model if left out")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or str(pull())
    rounds: dict[str, list[Round]] = {mode: [] for mode in (*MODES, "none")}
    for _ in range(arguments.rounds):
        for mode, results in rounds.items():
            with tempfile.TemporaryDirectory() as folder:
                record = RecordConfig(record="", validate_every=0)
                if mode in MODES:
                    record = RecordConfig(record=folder, validate_every=0, **MODES[mode])
                    if record.recover == "spool":
                        record = structs.replace(record, recover=f"{folder}/spool")
                results.append(uvloop.run(run(model, record, arguments.clients, arguments.requests)))
    for mode in MODES:
        report(mode, rounds[mode])
    drains = [us for result in rounds["wait"] for us in result.meter.loop_us]
    num_bytes = sum(result.num_bytes for result in rounds["wait"]) // len(drains)
    print_times("a bare write(2) in this rhythm", bare_writes(num_bytes, wall_s(rounds["wait"]) / len(drains)))
    for mode, results in rounds.items():
        print(f"wall time, median, {mode}: {statistics.median(result.wall_s for result in results):.2f} s")


def wall_s(results: list[Round]) -> float:
    """Of all rounds together."""
    return sum(result.wall_s for result in results)


def report(mode: str, results: list[Round]) -> None:
    """What a step costs in this mode."""
    loop_us = [us for result in results for us in result.meter.loop_us]
    thread_us = [us for result in results for us in result.meter.thread_us]
    waited_us = [us for result in results for us in result.meter.waited_us]
    num_bytes = sum(result.num_bytes for result in results) // len(loop_us)
    share = (sum(loop_us) + sum(thread_us)) / 1e6 / wall_s(results)
    print(f"{mode}: recorder CPU {share:.3%} of run time, {num_bytes} bytes a step")
    print_times("  a step, CPU in the loop", loop_us)
    if thread_us:
        print_times("  a write, CPU in the thread", thread_us)
    print_times("  clients wait", waited_us)


def print_times(what: str, times_us: list[float]) -> None:
    """Median and p99."""
    ordered = sorted(times_us)
    print(f"{what}: median {quantile(ordered, 50):.0f} us, p99 {quantile(ordered, 99):.0f} us")


if __name__ == "__main__":
    main()
