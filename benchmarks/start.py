"""How long does a server take from its start to the first token, where does the time go, and how much memory does it
take?

    python benchmarks/start.py [MODEL ...] [--rounds 3] [--ray]

For each model (the default one without any) `eventlm serve` is started with the compiled forward pass, with torch's,
and with step times measured anew; printed is the best of the rounds, in seconds since the process was started: when it
listens (its own imports, the checks of the model, the tokenizer; the worker imports torch meanwhile), when it is ready
(the worker: other imports, the weights read and packed, the warm-up where step times are not known) and when the first
token of a first request is there. Then the imports of both processes that cost most, as Python measures them. A first
round without step times in the cache measures them, too.

With --ray only two starts are compared: with the worker as a child of the server, and on a node of a Ray cluster that
is up on this host before. It has two threads, and step times are known.

Memory is the most that the worker has held when it is ready, beside the weights as it holds them. The KV cache is as
small as can be meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.launchers.ray.cluster import running_cluster

VARIANTS = {
    "compiled": ["--cpu-kernels", "auto"],
    "torch": ["--cpu-kernels", "torch"],
    "compiled, warm-up": ["--cpu-kernels", "auto", "--no-predictor-cache"],
}
#: What each process imports before it can do anything.
IMPORTS = {
    "engine": "import eventlm.cli.serve.server, eventlm.bootstrap.composition, eventlm.server.http_server, uvloop",
    "worker": "import eventlm.worker.process, eventlm.worker.model_runner",
}
NUM_IMPORTS = 6


class Start(NamedTuple):
    """Seconds since the process was started."""

    listening: float
    ready: float
    first_token: float


class Memory(NamedTuple):
    """Bytes: the most that the worker has held until it was ready, and the weights."""

    peak: int
    weights: int


def start(model: str, flags: list[str]) -> Start:
    """Start a server, ask it for one token, stop it."""
    began = time.perf_counter()
    server = _serve(model, ["--no-record", *flags])
    try:
        _, listening = _wait_for(server, "loading", began)
        ready_line, ready = _wait_for(server, "ready", began)
        _first_token(ready_line["url"], ready_line["model"])
        return Start(listening, ready, time.perf_counter() - began)
    finally:
        server.terminate()
        server.communicate()


def memory(model: str, flags: list[str]) -> Memory:
    """Start a server with a KV cache of a few blocks, look at its worker, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        server = _serve(model, ["--record", folder, "--max-model-len", "32", "--num-blocks", "4", *flags])
        try:
            _wait_for(server, "ready", time.perf_counter())
            peak = peak_bytes(worker_of(server.pid))
        finally:
            server.terminate()
            server.communicate()
        with (Path(folder) / "latest" / "trace.jsonl").open() as lines:
            host = json.loads(lines.readline())["host"]
    return Memory(peak, sum(host["weight_bytes"].values()))


def worker_of(process: int) -> int:
    """The worker among the processes that a server has started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    for child in map(int, children):
        if b"eventlm.worker.process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise SystemExit("the server has no worker")


def peak_bytes(process: int) -> int:
    """The most memory that a process has held."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _serve(model: str, flags: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eventlm", "serve", "--model", model, "--port", "0", "--log-format", "json"]
    return subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)


def _wait_for(server: subprocess.Popen[str], event: str, began: float) -> tuple[dict[str, Any], float]:
    """The log line of an event, and when it came."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if line.startswith("{") and (fields := json.loads(line)).get("event") == event:
            return fields, time.perf_counter() - began
    raise SystemExit("the server did not start:\n" + "".join(said))


def _first_token(url: str, model: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise SystemExit(f"the first request failed: {content.decode(errors='replace')}")
    connection.close()


def slowest_imports(code: str) -> list[tuple[str, float]]:
    """Packages by the seconds that their own modules took, the slowest first; the last is the sum of all."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    seconds: dict[str, float] = {}
    for line in done.stderr.splitlines():
        own, _, name = line.removeprefix("import time:").split("|") if line.count("|") == 2 else ("", "", "")
        if own.strip().isdigit():
            package = name.strip().partition(".")[0]
            seconds[package] = seconds.get(package, 0.0) + int(own) / 1e6
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return [*ordered[:NUM_IMPORTS], ("all", sum(seconds.values()))]


def best_of(model: str, variants: Mapping[str, list[str]], num_rounds: int) -> dict[str, Start]:
    """The fastest start of each variant, which take turns."""
    best: dict[str, Start] = {}
    for _ in range(num_rounds):
        for name, flags in variants.items():
            found = start(model, flags)
            best[name] = min(best.get(name, found), found, key=lambda each: each.first_token)
    return best


def compare_launchers(model: str, address: str, num_rounds: int) -> None:
    """Print how long a start takes with each launcher, after one that measures the times of steps."""
    launchers = {"process": "process", "ray": f"ray:address={address}"}
    variants = {name: ["--threads", "2", "--launcher", launcher] for name, launcher in launchers.items()}
    best_of(model, variants, 1)
    best = best_of(model, variants, num_rounds)
    print(f"{model:<32} {'ready':>8} {'first token':>12} {'to process':>11}")
    for name, found in best.items():
        ratio = found.ready / best["process"].ready
        print(f"  {name:<30} {found.ready:>8.2f} {found.first_token:>12.2f} {ratio:>11.2f}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="*", default=["smollm2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds is 1 at least")
    if arguments.ray:
        with running_cluster(1) as cluster:
            for model in arguments.models:
                compare_launchers(model, cluster.address, arguments.rounds)
        return
    for model in arguments.models:
        best = best_of(model, VARIANTS, arguments.rounds)
        print(f"{model:<32} {'listening':>10} {'ready':>8} {'first token':>12} {'to torch':>9}")
        for name, found in best.items():
            ratio = found.first_token / best["torch"].first_token
            print(f"  {name:<30} {found.listening:>10.2f} {found.ready:>8.2f} {found.first_token:>12.2f} {ratio:>9.2f}")
        held = memory(model, VARIANTS["compiled"])
        megabytes = [round(num_bytes / 1e6) for num_bytes in (held.weights, held.peak, held.peak - held.weights)]
        print("  compiled: weights of {} MB, at most {} MB held while loading, {} MB more".format(*megabytes))
    for process, code in IMPORTS.items():
        costs = ", ".join(f"{name} {seconds:.2f}" for name, seconds in slowest_imports(code))
        print(f"imports of the {process} (s, by package, without what it imports): {costs}")


if __name__ == "__main__":
    main()
