"""The mixes of `fidelity.py` whose records do not show everything: a real server, the fake model, HTTP clients.

rejections: a short queue that turns requests away. impatient: requests that are dropped when they are late, clients
that give up before the first token, and clients that leave after some tokens. closed-loop: a fixed number of clients.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from eventlm.bus.log_reader import LogReader
from eventlm.config.objectives import Objectives
from eventlm.replay.outcome import OutcomeCollector
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.compare import QUANTILES
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import WhatIfResult, what_if
from eventlm.table import table

#: 8 ms a step and an end after each token with a chance of 2.5 %: about 40 tokens an answer.
FAKE = "base_ns=8000000,prefill_token_ns=20000,end_ppm=25000"
MAX_TOKENS = 160
PROMPT_TOKENS = (48, 600)
OBJECTIVES = Objectives(ttft=600)
START_SECONDS = 60


class Client(NamedTuple):
    """A request and what its sender does. Seconds and tokens after which it leaves; 0: it waits for the end."""

    arrival_s: float
    prompt_tokens: int
    patience_s: float = 0.0
    leaves_after: int = 0
    deadline_ms: int = 0


class Change(NamedTuple):
    """An alternative, as the server's flags and as a what-if has it."""

    name: str
    flags: tuple[str, ...]
    alternative: Alternative


class Mix(NamedTuple):
    """Work, the server that is recorded, and others. num_clients: of a closed loop; 0: requests come at their times."""

    rate: float
    num_requests: int
    flags: tuple[str, ...]
    changes: tuple[Change, ...]
    is_impatient: bool = False
    num_clients: int = 0


class Figure(NamedTuple):
    """A metric of an alternative, as predicted and as it came."""

    mix: str
    change: str
    metric: str
    recorded: float
    predicted: float
    error_bar: float
    is_significant: bool
    reruns: list[float]

    @property
    def truth(self) -> float:
        """The median of the reruns."""
        return statistics.median(self.reruns)

    @property
    def is_within(self) -> bool:
        """Whether the truth lies in the error bar, which is as wide as the reruns differ at least."""
        return abs(self.predicted - self.truth) <= max(self.error_bar, max(self.reruns) - min(self.reruns))

    @property
    def has_wrong_sign(self) -> bool:
        """Whether a change that is called one went the other way."""
        return self.is_significant and (self.predicted - self.recorded) * (self.truth - self.recorded) < 0


def change(name: str, *, policy: str = "", num_clients: int = 0, **settings: Any) -> Change:
    """Another policy and other settings of the scheduler."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    flags += [f"--policy={policy}"] if policy else []
    changes = Changes(policy={"type": policy} if policy else None, settings=settings)
    return Change(name, tuple(flags), Alternative(changes=changes, closed_loop=num_clients))


MIXES = {
    "rejections": Mix(
        rate=14.0,
        num_requests=220,
        flags=("--max-num-seqs=4", "--max-queue-len=6"),
        changes=(
            change("edf, room for 60", policy="edf", max_queue_len=60),
            change("edf, 8 sequences", policy="edf", max_num_seqs=8),
        ),
    ),
    "impatient": Mix(
        rate=12.0,
        num_requests=200,
        flags=("--max-num-seqs=4",),
        changes=(change("edf", policy="edf"), change("8 sequences", max_num_seqs=8)),
        is_impatient=True,
    ),
    "closed-loop": Mix(
        rate=0.0,
        num_requests=160,
        flags=("--max-num-seqs=4",),
        changes=(
            change("8 sequences", num_clients=12, max_num_seqs=8),
            change("lrs, 3 sequences", num_clients=12, policy="lrs", max_num_seqs=3),
        ),
        num_clients=12,
    ),
}


def draw_clients(mix: Mix, seed: int) -> list[Client]:
    """Poisson arrivals of short and long prompts."""
    chance = random.Random(f"{seed}")
    now_s, found = 0.0, []
    for _ in range(mix.num_requests):
        now_s += -math.log(1 - chance.random()) / mix.rate if mix.rate else 0.0
        client = Client(now_s, PROMPT_TOKENS[chance.random() < 0.25])
        kind = chance.randrange(4) if mix.is_impatient else 3
        if kind == 0:
            client = client._replace(patience_s=0.2 + 0.8 * chance.random())
        elif kind == 1:
            client = client._replace(leaves_after=chance.randrange(3, 30))
        elif kind == 2:
            client = client._replace(deadline_ms=chance.randrange(200, 800))
        found.append(client)
    return found


class _Server:
    """`eventlm serve` with the fake model, which records into a folder."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        arguments = ["serve", "--model=fake", f"--fake={FAKE}", f"--port={self.url.rpartition(':')[2]}"]
        arguments += [f"--record={folder}", "--log-level=error", *flags]
        self._process = subprocess.Popen([sys.executable, "-m", "eventlm", *arguments], env=os.environ.copy())

    async def wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        """Until it answers."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < START_SECONDS:
            try:
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit("the server did not start in time")

    def stop(self) -> Path:
        """Stop it; the folder of its run."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        return (self._folder / "latest").resolve()


async def _send(session: aiohttp.ClientSession, url: str, client: Client, index: int) -> None:
    """One request, as its client has it. The seed makes its answer the same in every run."""
    chance = random.Random(f"prompt {index}")
    body: dict[str, Any] = {
        "model": "fake",
        "prompt": [chance.randrange(97, 122) for _ in range(client.prompt_tokens)],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "seed": index,
    }
    if client.deadline_ms:
        body |= {"deadline_ms": client.deadline_ms, "drop_if_late": True}
    num_tokens = 0
    began_s = time.monotonic()
    try:
        limit = aiohttp.ClientTimeout(total=None)
        request = session.post(f"{url}/v1/completions", json=body, timeout=limit)
        answer = await asyncio.wait_for(request, client.patience_s or None)
        try:
            if answer.status != 200:
                return
            while True:
                left_s = (
                    client.patience_s - (time.monotonic() - began_s) if client.patience_s and not num_tokens else None
                )
                line = await asyncio.wait_for(answer.content.readline(), left_s)
                if not line:
                    return
                num_tokens += line.startswith(b"data: {")
                if num_tokens == client.leaves_after > 0:
                    return
        finally:
            answer.close()
    except TimeoutError:
        return


async def _serve(mix: Mix, clients: Sequence[Client], folder: Path, flags: Sequence[str]) -> Path:
    server = _Server(folder, [*mix.flags, *flags])
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await server.wait_until_ready(session)
            began_s = time.monotonic()
            line = iter(enumerate(clients))

            async def at_its_time(index: int, client: Client) -> None:
                await asyncio.sleep(max(client.arrival_s - (time.monotonic() - began_s), 0))
                await _send(session, server.url, client, index)

            async def one_after_the_other() -> None:
                for index, client in line:
                    await _send(session, server.url, client, index)

            if mix.num_clients:
                await asyncio.gather(*(one_after_the_other() for _ in range(mix.num_clients)))
            else:
                await asyncio.gather(*(at_its_time(*each) for each in line))
    finally:
        run = server.stop()
    return run


def values_of(run: Path) -> dict[str, float]:
    """The metrics of a run, under the names that a what-if gives them."""
    collector = OutcomeCollector(OBJECTIVES)
    with LogReader(run / "trace.jsonl") as log:
        for line in log:
            collector.see(line.event())
    outcome = collector.outcome()
    found: dict[str, float] = {
        "requests_per_second": outcome.requests_per_second,
        "output_tokens_per_second": outcome.output_tokens_per_second,
        "slo_met": outcome.objectives_met_ppm or 0,
        "rejected": sum(outcome.reject_reasons.values()),
        "cut_short": sum(not each.is_complete for each in outcome.sequences),
    }
    for latency in ("ttft", "e2e"):
        distribution = outcome.latency(latency)
        for quantile in QUANTILES[:2]:
            found[f"{latency}_{quantile}"] = float(getattr(distribution, quantile))
    return found


def measure(name: str, folder: Path, *, seed: int, rounds: int) -> tuple[WhatIfResult, list[Figure]]:
    """Record a mix, predict its alternatives, and serve them."""
    mix = MIXES[name]
    clients = draw_clients(mix, seed)
    recorded = asyncio.run(_serve(mix, clients, folder / name / "recorded", ()))
    result = what_if(recorded, [each.alternative for each in mix.changes], objectives=OBJECTIVES)
    before = values_of(recorded)
    figures = []
    for index, each in enumerate(mix.changes):
        reruns = [
            values_of(asyncio.run(_serve(mix, clients, folder / name / f"{index}-{number}", each.flags)))
            for number in range(rounds)
        ]
        for metric in result.comparison.metrics:
            cell = metric.alternatives[index]
            if metric.name not in before or not any((before[metric.name], cell.value, reruns[0][metric.name])):
                continue
            figures.append(
                Figure(
                    name,
                    each.name,
                    metric.name,
                    before[metric.name],
                    float(cell.value or 0),
                    cell.error_bar or 0.0,
                    cell.is_significant,
                    [rerun[metric.name] for rerun in reruns],
                )
            )
    return result, figures


def report(figures: Sequence[Figure]) -> bool:
    """Print predicted against measured; whether the targets are met: nine in ten within the bar, and no wrong sign."""
    headings = ["mix", "alternative", "metric", "recorded", "predicted", "truth", "bar", "spread", "within", "sign"]
    rows = []
    for each in figures:
        unit = 1e6 if each.metric.startswith(("ttft", "e2e")) else 1e4 if each.metric == "slo_met" else 1.0
        spread = max(each.reruns) - min(each.reruns)
        numbers = (each.recorded, each.predicted, each.truth, each.error_bar, spread)
        sign = "-" if not each.is_significant else "WRONG" if each.has_wrong_sign else "right"
        within = "yes" if each.is_within else "NO"
        rows.append([each.mix, each.change, each.metric, *(f"{n / unit:,.1f}" for n in numbers), within, sign])
    for line in table(headings, rows, left=range(3)):
        print(line)
    num_within = sum(each.is_within for each in figures)
    num_wrong = sum(each.has_wrong_sign for each in figures)
    print(f"within the error bar: {num_within} of {len(figures)}; wrong sign outside it: {num_wrong}")
    return num_within * 10 >= len(figures) * 9 and not num_wrong
