"""What HTTP costs: streams from the fake worker through the engine alone, the server in one process, and front ends.

    python benchmarks/server/front_end_cost.py [--streams 256] [--tokens 256] [--requests 1024] [--front-ends 0 1 2]
                                        [--rounds 2] [--profile]

Each case is `eventlm serve` as users start it, recording to a temporary folder, with a load client in a process of its
own (eventlm.bench's); the first case is an engine in a process that only counts its tokens. Every stream has its own
connection, every token its own event. Printed are tokens per second by the wall, and for each process the processor
time that a token costs it: what one process could do at most, on a core of its own, is 1 s / that time. On a machine
with fewer cores than busy processes (client, front ends, engine, worker) the wall shows their sum, shared out by the
cores.

--profile: where the time of the engine's process and of the first front end goes, by py-spy, in a run of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

#: Nothing of the worker's time is waiting: the steps follow each other as fast as they are computed.
FAKE = "base_ns=1000,prefill_token_ns=1,decode_ns=1,context_token_ns=0"
PROMPT = "The quick brown fox jumps over the lazy dog"
PATIENCE_SECONDS = 120.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
FLAGS = ["--model", "fake", "--fake", FAKE, "--num-blocks", "20000", "--log-level", "warning"]
PROFILE_SECONDS = 10


class Case(NamedTuple):
    """What a case showed. `cpu_us` is processor time for each token, by process."""

    name: str
    num_tokens: int
    seconds: float
    cpu_us: dict[str, float]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def children(pid: int) -> dict[str, int]:
    """The processes of a server or an engine, itself included, by what they are."""
    found = {"engine": pid}
    counts: Counter[str] = Counter()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
        kind = "front end" if "eventlm.cli.serve.front_end" in command else "worker"
        counts[kind] += 1
        found[f"{kind} {counts[kind]}"] = int(child)
    return found


def measure(name: str, processes: dict[str, int], run: Any) -> Case:
    """Run a load and measure the CPU time of each process."""
    before = {process: cpu_seconds(pid) for process, pid in processes.items()}
    report = run()
    cpu = {process: cpu_seconds(pid) - before[process] for process, pid in processes.items()}
    num_tokens, seconds = report["num_tokens"], report["seconds"]
    cpu_us = {process: spent / num_tokens * 1e6 for process, spent in cpu.items()}
    if "cpu_seconds" in report:
        cpu_us["client"] = report["cpu_seconds"] / num_tokens * 1e6
    return Case(name, num_tokens, seconds, cpu_us)


def run_child(arguments: argparse.Namespace, *mode: str) -> list[str]:
    """The command line of this file in another role."""
    sizes = ("streams", "tokens", "requests")
    flags = [part for size in sizes for part in (f"--{size}", str(getattr(arguments, size)))]
    return [sys.executable, __file__, *flags, *mode]


def engine_case(arguments: argparse.Namespace, folder: Path) -> Case:
    """The engine without HTTP."""
    process = subprocess.Popen(
        run_child(arguments, "--role", "engine"), cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run() -> dict[str, Any]:
        stdin.write("go\n")
        stdin.flush()
        return dict(json.loads(stdout.readline()))

    try:
        stdout.readline()
        run()
        return measure("engine alone", children(process.pid), run)
    finally:
        stdin.close()
        process.wait(PATIENCE_SECONDS)


class Server:
    """`eventlm serve` in a folder."""

    def __init__(self, folder: Path, num_front_ends: int, num_streams: int) -> None:
        flags = ["--max-num-seqs", str(num_streams), "--max-num-batched-tokens", str(max(num_streams, 2048))]
        serve = ["serve", "--port", "0", "--record", "runs", "--api-servers", str(num_front_ends), *FLAGS, *flags]
        self.stderr = folder / f"stderr{num_front_ends}"
        with self.stderr.open("wb") as stderr:
            command = [sys.executable, "-m", "eventlm", *serve, "--log-level", "info"]
            self.process = subprocess.Popen(command, cwd=folder, stderr=stderr, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(r'"url":"([^"]+)".*"event":"ready"', self.stderr.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{self.stderr.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)


def load(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run the load client to its end."""
    command = run_child(arguments, "--role", "client", "--url", url)
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def server_case(arguments: argparse.Namespace, folder: Path, num_front_ends: int) -> Case:
    """The server with so many front ends; 0: the engine's process speaks HTTP."""
    server = Server(folder, num_front_ends, arguments.streams)
    try:
        warm_up = argparse.Namespace(**vars(arguments) | {"requests": arguments.streams, "tokens": 16})
        load(warm_up, server.url)
        name = f"{num_front_ends} front end{'s' * (num_front_ends > 1)}" if num_front_ends else "in one process"
        return measure(name, children(server.process.pid), lambda: load(arguments, server.url))
    finally:
        server.stop()


def profile(arguments: argparse.Namespace, folder: Path, num_front_ends: int) -> None:
    """Print where the time goes, in functions' own time."""
    if shutil.which("py-spy") is None and not (Path(sys.executable).parent / "py-spy").exists():
        raise SystemExit("--profile needs py-spy: pip install py-spy")
    spy = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
    server = Server(folder, num_front_ends, arguments.streams)
    try:
        client = subprocess.Popen(
            run_child(arguments, "--role", "client", "--url", server.url, "--requests", "1000000"),
            stdout=subprocess.DEVNULL,
        )
        time.sleep(2)
        processes = {name: pid for name, pid in children(server.process.pid).items() if name != "worker 1"}
        spies = {}
        for name, pid in processes.items():
            output = folder / f"{name}.raw"
            command = [spy, "record", "-d", str(PROFILE_SECONDS), "-r", "200", "-f", "raw", "-o", str(output)]
            spies[name] = (subprocess.Popen([*command, "-p", str(pid)], stdout=-3, stderr=-3), output)
        for name, (process, output) in spies.items():
            process.wait(PATIENCE_SECONDS)
            print_profile(f"{name} of {num_front_ends or 'no'} front ends", output)
        client.kill()
        client.wait()
    finally:
        server.stop()


def print_profile(name: str, output: Path) -> None:
    """The functions that most samples were taken in, and below."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in output.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        own[frames[-1]] += int(number)
        for frame in set(frames):
            total[frame] += int(number)
    num_samples = sum(own.values()) or 1
    print(f"\n{name}: {num_samples} samples\n{'own':>7}{'with callees':>14}")
    for frame, count in own.most_common(22):
        print(f"{count / num_samples:>7.1%}{total[frame] / num_samples:>14.1%}  {frame}")


async def run_client(arguments: argparse.Namespace) -> dict[str, Any]:
    """The load: so many streams at once, each request as long as the others."""
    from eventlm.bench.load import Load
    from eventlm.bench.records import LoadRequest
    from eventlm.client.openai_client import OpenAIClient

    def body(seed: int) -> dict[str, Any]:
        return {"model": "fake", "prompt": PROMPT, "max_tokens": arguments.tokens, "seed": seed, "ignore_eos": True}

    requests = (LoadRequest(seed, body(seed)) for seed in range(arguments.requests))
    async with OpenAIClient(arguments.url, timeout_seconds=PATIENCE_SECONDS) as client:
        result = await Load(client, "completions", requests, max_concurrency=arguments.streams).run(asyncio.Event())
    failed = [record.message for record in result.records if not record.is_success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    # The server's count, which does not depend on how many tokens an event holds.
    num_tokens = arguments.tokens * len(result.records)
    return {"num_tokens": num_tokens, "seconds": result.duration_ns / 1e9, "cpu_seconds": result.cpu_ns / 1e9}


async def run_engine(arguments: argparse.Namespace) -> None:
    """An engine, and the same load without HTTP: whenever a line comes."""
    from eventlm.bootstrap.composition import compose
    from eventlm.config.load import load_config
    from eventlm.engine.inference_engine import InferenceEngine
    from eventlm.engine.request import Request, TokensOutput
    from eventlm.sampling_params import SamplingParams
    from eventlm.scheduling_params import SchedulingParams

    async def one(engine: InferenceEngine, seed: int, indices: asyncio.Semaphore) -> int:
        params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=seed)
        request = Request(
            prompt_token_ids=list(PROMPT.encode()), sampling=params, scheduling=SchedulingParams(model="fake")
        )
        num_tokens = 0
        async with indices:
            [handle] = await engine.submit([request])
            async for output in handle:
                if isinstance(output, TokensOutput):
                    num_tokens += len(output.token_ids)
        return num_tokens

    options = {"model": "fake", "fake": FAKE, "num_blocks": 20000, "record": "runs", "max_num_seqs": arguments.streams}
    options["max_num_batched_tokens"] = max(arguments.streams, 2048)
    engine = compose(load_config(None, options, environment={})).engine
    await engine.start()
    print("ready", flush=True)
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            indices, start = asyncio.Semaphore(arguments.streams), time.monotonic()
            counts = await asyncio.gather(*(one(engine, seed, indices) for seed in range(arguments.requests)))
            print(json.dumps({"num_tokens": sum(counts), "seconds": time.monotonic() - start}), flush=True)
    finally:
        await engine.stop()


def print_cases(cases: list[Case]) -> None:
    """A row for each case, the fastest of its rounds."""
    columns = ["engine", "front end 1", "front end 2", "worker 1", "client"]
    head = f"{'':<16}{'tokens/s':>10}" + "".join(f"{column:>13}" for column in columns) + f"{'sum':>9}"
    print(head + "   us of processor time a token")
    for case in cases:
        cells = [f"{case.cpu_us[column]:13.1f}" if column in case.cpu_us else f"{'':>13}" for column in columns]
        rate = case.num_tokens / case.seconds
        print(f"{case.name:<16}{rate:>10,.0f}" + "".join(cells) + f"{sum(case.cpu_us.values()):>9.1f}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--front-ends", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=2, help="the fastest counts")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--role", choices=["client", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import uvloop

    if arguments.role == "client":
        print(json.dumps(uvloop.run(run_client(arguments))))
        return 0
    if arguments.role == "engine":
        uvloop.run(run_engine(arguments))
        return 0
    print(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before, Python {sys.version.split()[0]}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.profile:
            for num_front_ends in arguments.front_ends:
                profile(arguments, folder, num_front_ends)
            return 0
        found: list[list[Case]] = []
        for _ in range(arguments.rounds):
            cases = [engine_case(arguments, folder)]
            cases += [server_case(arguments, folder, number) for number in arguments.front_ends]
            found.append(cases)
        print_cases([min(cases, key=lambda case: case.seconds) for cases in zip(*found, strict=True)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
