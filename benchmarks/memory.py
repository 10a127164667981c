"""Does the memory of the engine process grow with the requests that it has served?

    python benchmarks/memory.py [--requests 100000] [--clients 64]

Short requests through the fake worker, with a trace in segments of 4 MiB of which 16 MiB are kept. Printed is the
resident memory after each tenth of the requests, its slope over the second half, and, of Python's objects, the types
whose number has grown most since then.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

import structlog
import uvloop

from eventlm.config import Config, ModelConfig, RecordConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import FinishedOutput, Request
from eventlm.engine.setup import make_setup
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system

PROMPT_TOKENS = 40
OUTPUT_TOKENS = 4
#: Steps cost next to nothing: it is the engine that is looked at.
FAKE = {"base_ns": 100_000, "prefill_token_ns": 0, "decode_ns": 0, "context_token_ns": 0}


def resident_bytes() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


def count_objects() -> Counter[str]:
    """Python's tracked objects by type."""
    gc.collect()
    return Counter(type(thing).__qualname__ for thing in gc.get_objects())


def make_engine(folder: str) -> InferenceEngine:
    """One replica of the fake model that records."""
    record = RecordConfig(record=folder, record_segment="4MiB", record_keep="16MiB", validate_every=0)
    config = Config(model=ModelConfig(model="fake", fake=FAKE), record=record)
    return InferenceEngine(
        make_setup(config, model="fake", model_name="m", num_blocks=1024, max_model_len=512), real_system()
    )


async def run(folder: str, *, num_requests: int, num_clients: int) -> None:
    """Serve all, and print a line after each tenth."""
    engine = make_engine(folder)
    await engine.start()
    numbers = count()
    tenth = max(num_requests // 10, 1)
    samples: list[tuple[int, int]] = []
    half: Counter[str] = Counter()
    start = time.monotonic()

    def note(num_served: int) -> None:
        nonlocal half
        objects = count_objects()
        samples.append((num_served, resident_bytes()))
        print(
            f"{num_served:>9,} requests {samples[-1][1] / 2**20:>8.1f} MiB {sum(objects.values()):>9,} objects"
            f" {num_served / (time.monotonic() - start):>8.0f} requests/s",
            flush=True,
        )
        if num_served <= num_requests // 2:
            half = objects
        elif num_served == num_requests:
            grown = [(name, growth) for name, growth in (objects - half).most_common(8) if growth > 50]
            print("objects that grew:", ", ".join(f"{name} +{growth:,}" for name, growth in grown) or "none")

    async def client() -> None:
        while (number := next(numbers)) < num_requests:
            prompt = [(number * 7919 + index * 104_729) % 256 for index in range(PROMPT_TOKENS)]
            params = SamplingParams(max_tokens=OUTPUT_TOKENS)
            (handle,) = await engine.submit(
                [Request(prompt_token_ids=prompt, sampling=params, scheduling=SchedulingParams(model="m"))]
            )
            async for output in handle:
                assert not isinstance(output, FinishedOutput) or output.reason == "length"
            if (number + 1) % tenth == 0:
                note(number + 1)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    await engine.stop()
    assert engine.run_folder is not None
    files = list(engine.run_folder.iterdir())
    kept = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files of the trace are kept, {kept / 2**20:.1f} MiB")
    late = [sample for sample in samples if sample[0] >= num_requests // 2]
    print(f"slope over the second half: {slope(late):.1f} bytes a request")


def slope(samples: list[tuple[int, int]]) -> float:
    """Of the line of least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(run(folder, num_requests=arguments.requests, num_clients=arguments.clients))


if __name__ == "__main__":
    main()
