"""Whether a what-if of a gateway's run foretells what another router or policy really does before running servers.

    python benchmarks/what_if/backend_fidelity.py [--compare router] [--backends 4] [--max-concurrency N]
                                                  [--seconds 20] [--rate 12] [--rounds 3] [--folder DIR] [--json FILE]

Stand-ins for servers compute prompts one after the other and keep prefixes in caches of their own. `eventlm serve` runs
in front of them under round robin, is sent prompts that share beginnings, and is recorded. From that record alone
prefix affinity and least loaded are predicted. Then all three run for some rounds, each time with new servers, and get
the same requests at the same times. The servers wait more than they compute, so two cores are enough.

With `--backends 2 --max-concurrency 2` the gateway lets each server have two requests, and the others wait in its own
queue. The servers then do a little more than 8 requests a second; close to that, small differences of their times add
up in the queue. With `--compare policy` fcfs is recorded, and lrs predicted.

Targets: medians within 10 %, unless the reruns themselves differ by more, and the right winner where two differ by more
than 15 %. Each run takes --seconds and about 4 s more, and the record and each round of all that are compared are runs.
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.what_if.fidelity import outcome_of, value_ms
from eventlm.client.openai_client import OpenAIClient
from eventlm.replay.outcome import RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.report import render
from eventlm.replay.what_if.what_if import what_if

ROOT = Path(__file__).resolve().parents[2]
#: What is recorded, and what is predicted from that.
COMPARED = {"router": ("round_robin", "prefix_affinity", "least_loaded"), "policy": ("fcfs", "lrs")}
LATENCIES = ("ttft", "e2e")
#: A prompt has the beginning of its family and an end of its own, in characters; four are a token.
NUM_FAMILIES, FAMILY_CHARACTERS, OWN_CHARACTERS = 16, 1600, (200, 1200)
OUTPUT_TOKENS = (10, 60)
BACKEND = [
    *("--first-delay", "0.005", "--prompt-token-delay", "0.0002", "--token-delay", "0.01", "--running-delay", "0.001"),
    *("--max-concurrency", "16", "--cache-blocks", "300"),
]
#: Of medians, and of what counts as a difference.
TARGET, DIFFERENCE = 0.10, 0.15
PATIENCE_SECONDS = 30


class Sent(NamedTuple):
    """A request, and when it is sent."""

    at_seconds: float
    prompt: str
    max_tokens: int


class Gateway(NamedTuple):
    """A server with a router or policy (`kind`) before so many backends, each of which gets `max_concurrency` requests
    at once; 0: as many as the server finds good.
    """

    kind: str
    name: str
    num_backends: int
    max_concurrency: int

    def flags(self, urls: list[str]) -> list[str]:
        """Of `eventlm serve`."""
        limit = f",max_concurrency={self.max_concurrency}" if self.max_concurrency else ""
        return [f"--{self.kind}", self.name, *(flag for url in urls for flag in ("--backend", url + limit))]


class Figure(NamedTuple):
    """The median of a latency under a router or policy, in ms."""

    name: str
    latency: str
    predicted: float
    reruns: list[float]

    @property
    def measured(self) -> float:
        """The median of the reruns."""
        return statistics.median(self.reruns)

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1

    @property
    def spread(self) -> float:
        """Of the reruns: what a machine cannot repeat cannot be predicted."""
        return (max(self.reruns) - min(self.reruns)) / self.measured


def draw_requests(*, seconds: float, rate: float, seed: int) -> list[Sent]:
    """Poisson arrivals of prompts that share beginnings."""
    rng = random.Random(seed)
    families = [_text(rng, FAMILY_CHARACTERS) for _ in range(NUM_FAMILIES)]
    found, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        prompt = rng.choice(families) + _text(rng, rng.randrange(*OWN_CHARACTERS))
        found.append(Sent(now, prompt, rng.randrange(*OUTPUT_TOKENS)))
    return found


def _text(rng: random.Random, num_characters: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=num_characters))


@contextmanager
def backends(count: int) -> Iterator[list[str]]:
    """The addresses of new servers."""
    command = [sys.executable, "-m", "tests.gateway.stub_backend", "--num-tokens", "200", *BACKEND]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [str(each.stdout.readline()).strip() for each in started if each.stdout is not None]
    finally:
        for each in started:
            each.kill()
            each.wait()


def run(requests: list[Sent], gateway: Gateway, folder: Path) -> Path:
    """Serve the requests; the folder of the run."""
    folder.mkdir(parents=True)
    with backends(gateway.num_backends) as urls, (folder / "stderr").open("wb") as stderr:
        serve = ["serve", "--port", "0", "--record", str(folder), "--log-level", "info", *gateway.flags(urls)]
        process = subprocess.Popen([sys.executable, "-m", "eventlm", *serve], cwd=ROOT, stderr=stderr)
        try:
            url = _url(process, folder / "stderr")
            asyncio.run(_send(requests, url))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
    return (folder / "latest").resolve()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := re.search(r'"url":"([^"]+)".*"event":"ready"', log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return found[1]


async def _send(requests: list[Sent], url: str) -> None:
    async with OpenAIClient(url) as client:
        [model] = await client.models()
        began = time.monotonic() + 0.2

        async def send(each: Sent) -> None:
            await asyncio.sleep(began + each.at_seconds - time.monotonic())
            body: dict[str, Any] = {"model": model, "prompt": each.prompt, "max_tokens": each.max_tokens}
            async for _ in client.stream_completion(body):
                pass

        await asyncio.gather(*map(send, requests))


def measure(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Record, predict, and run."""
    requests = draw_requests(seconds=arguments.seconds, rate=arguments.rate, seed=arguments.seed)
    print(f"{len(requests)} requests, {arguments.rate:g} a second", flush=True)
    kind, names = arguments.compare, COMPARED[arguments.compare]
    gateways = [Gateway(kind, name, arguments.backends, arguments.max_concurrency) for name in names]
    recorded = run(requests, gateways[0], folder / "recorded")
    result = what_if(
        recorded,
        [Alternative(changes=structs.replace(Changes(), **{kind: {"type": name}})) for name in names[1:]],
        output=folder / "predicted",
    )
    print(render(result), flush=True)
    for each in result.alternatives:
        assert verify(each.run_folder).exit_code == 0, each.run_folder
    metrics = {metric.name: metric for metric in result.comparison.metrics}
    reruns: list[list[RunOutcome]] = [[] for _ in gateways]
    for index in range(arguments.rounds):
        for gateway, found in zip(gateways, reruns, strict=True):
            found.append(outcome_of(run(requests, gateway, folder / f"{gateway.name}-{index}")))
        print(f"round {index + 1} of {arguments.rounds} done", flush=True)
    figures = []
    for latency in LATENCIES:
        metric = metrics[f"{latency}_p50"]
        values = [metric.baseline, *(cell.value for cell in metric.alternatives)]
        for name, value, found in zip(names, values, reruns, strict=True):
            assert value is not None
            measured = [value_ms(outcome, latency, "p50") for outcome in found]
            figures.append(Figure(name, latency, value / 1e6, measured))
    return figures


def report(figures: list[Figure]) -> bool:
    """Print the figures; whether the targets are met."""
    print("                 median  predicted, ms  measured, ms   error  spread  reruns, ms")
    for each in figures:
        reruns = " ".join(f"{value:.1f}" for value in each.reruns)
        print(
            f"{each.name:<15}  {each.latency:<6}  {each.predicted:>13,.1f}  {each.measured:>12,.1f}  "
            f"{each.error:>+6.1%}  {each.spread:>6.1%}  {reruns}"
        )
    is_met = all(abs(each.error) <= max(TARGET, each.spread) for each in figures)
    for latency in LATENCIES:
        for one, other in combinations([each for each in figures if each.latency == latency], 2):
            if abs(one.measured - other.measured) > DIFFERENCE * min(one.measured, other.measured):
                is_right = (one.measured < other.measured) == (one.predicted < other.predicted)
                is_met = is_met and is_right
                print(f"winner by {latency}, {one.name} or {other.name}: {'right' if is_right else 'wrong'}")
    return is_met


def main() -> int:
    """Measure, and print predicted against measured; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", choices=COMPARED, default="router")
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--max-concurrency", type=int, default=0, help="requests at once at each backend")
    parser.add_argument("--seconds", type=float, default=20, help="how long requests arrive in each run")
    parser.add_argument("--rate", type=float, default=12, help="requests a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="keep the traces there, in a new folder")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = measure(arguments, Path(arguments.folder or temporary))
    is_met = report(figures)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([each._asdict() for each in figures], indent=1))
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
