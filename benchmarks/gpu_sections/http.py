"""What HTTP costs: 256 streams through `eventlm serve`, each token an event, against the offline API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import Workload, engine_options, generate, nano_workload, start, warm_up
from benchmarks.gpu_harness.http_client import Job, Result
from benchmarks.gpu_harness.row import Context, Parts, Row, SectionError, speed

TARGET = 0.9
START_SECONDS, STOP_SECONDS = 120.0, 20.0
#: The engine and its worker have a core each.
FRONT_END_SHARE, CLIENT_SHARE = 3 / 8, 1 / 4
WARM_UP_TOKENS = 8


class Server(NamedTuple):
    """Where it listens, and what it calls its model."""

    url: str
    model: str


def parts(context: Context) -> Parts:
    """Both in one: the ratio needs both."""
    return {"http": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    model, workload = qwen(context, "0.6B"), nano_workload(context)
    with start(context, model, record=Path(context.folder) / "runs") as llm:
        warm_up(llm, workload)
        offline = generate(llm, workload)
    cores = len(os.sched_getaffinity(0))
    num_front_ends, num_clients = (max(int(cores * share), 1) for share in (FRONT_END_SHARE, CLIENT_SHARE))
    with _serve(context, model, num_front_ends) as server:
        backwards = [prompt[::-1] for prompt in workload.prompts]
        _load(server, Workload(backwards, [WARM_UP_TOKENS] * len(backwards)), num_clients)
        rate = _load(server, workload, num_clients)
    yield speed(
        f"{len(workload.prompts)} streams through HTTP",
        rate,
        "tok/s",
        limit=offline.rate,
        limit_name="offline",
        target=TARGET,
        note=f"{num_front_ends} front ends, {num_clients} client processes, {cores} cores",
    )


@contextmanager
def _serve(context: Context, model: Path, num_front_ends: int) -> Iterator[Server]:
    """`eventlm serve`, recording, from when it is ready."""
    log = Path(context.folder) / "serve.log"
    flags = [f"--{name.replace('_', '-')}={_text(value)}" for name, value in engine_options(context).items()]
    record = ["--record", str(Path(context.folder) / "runs"), "--log-format", "json"]
    command = [sys.executable, "-m", "eventlm", "serve", str(model), "--port", "0", *record, *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, "--api-servers", str(num_front_ends)], stderr=stderr)
    try:
        yield _wait_until_ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> Server:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        # Looked at first: what it says at its end is in the log then.
        has_ended = process.poll() is not None
        lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        for fields in lines:
            if fields["event"] == "ready":
                return Server(fields["url"], fields["model"])
        if has_ended:
            break
        time.sleep(0.1)
    raise SectionError(f"the server did not start: {log.read_text()[-300:]}")


def _load(server: Server, workload: Workload, num_clients: int) -> float:
    """Output tokens a second, from the first client's start to the last one's end."""
    clients = [_start_client(server, workload, index, num_clients) for index in range(num_clients)]
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()
    outputs = []
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    for client in clients:
        output, _ = client.communicate()
        outputs.append(msgspec.json.decode(output, type=Result))
    if failures := [output.failure for output in outputs if output.failure]:
        raise SectionError(f"a request failed: {failures[0]}")
    num_tokens = sum(output.num_tokens for output in outputs)
    if num_tokens != sum(workload.output_lens):
        raise SectionError(f"{num_tokens} tokens came of {sum(workload.output_lens)}")
    took_ns = max(output.end_ns for output in outputs) - min(output.start_ns for output in outputs)
    return num_tokens / took_ns * 1e9


def _start_client(server: Server, workload: Workload, index: int, num_clients: int) -> subprocess.Popen[str]:
    """With every so manieth of the prompts."""
    command = [sys.executable, "-m", "benchmarks.gpu_harness.http_client"]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    job = Job(server.url, server.model, workload.prompts[index::num_clients], workload.output_lens[index::num_clients])
    assert client.stdin is not None
    client.stdin.write(msgspec.json.encode(job).decode() + "\n")
    client.stdin.flush()
    return client
