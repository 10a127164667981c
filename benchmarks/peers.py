"""eventlm beside OpenVINO GenAI and llama.cpp's server: throughput and latency over HTTP, on this machine's processor.

    python benchmarks/peers.py [--models qwen3-0.6b smollm2] [--precision bf16 int8 q4_k_m q4_0 q8_0 q4_1 int4] [--avx2]
                               [--clients 1 8 32] [--rounds 3] [--servers eventlm openvino llama.cpp]
                               [--output peers.json]

The peers are set up at the first use, in the cache (`peers` in ~/.cache/eventlm): OpenVINO GenAI from its packages,
llama.cpp's server compiled from the source that llama-cpp-python's sdist carries (a quarter of an hour on two cores).
All serve the same checkpoint, converted by the peers' own tools: the default model, and random weights of the shape of
Qwen3-0.6B. `eventlm bench serve` puts the load on: a closed loop of so many streaming clients that all begin at once,
two requests each (four of a single one), prompts of 128 tokens of which no two share a beginning, outputs of exactly
64. The servers of a model are up at the same time and are loaded in turns, round by round, each round beginning with
another; what is printed are medians over the rounds. Nothing else should run on the machine.

int8 is W8A8 for eventlm, int8 weights for OpenVINO, q8_0 for llama.cpp; int4 are int4 weights for eventlm and OpenVINO.
q4_k_m and so on are GGUF files that llama.cpp's quantiser made, served as they are by eventlm and llama.cpp; q4_1 of
the default model is the file that its authors published. With --avx2 these two use no wider vectors. `openvino-256` is
OpenVINO with steps of at most 256 tokens, its default, in place of 1,024, with which it has most tokens a second: first
tokens come sooner and all others later.

A server that does not start, or gives wrong lengths, is reported with the end of its log, and the others go on. Exit
code 1: some figure is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peer.checkpoints import GGUF_PRECISIONS, OPENVINO_FORMATS, checkpoint
from benchmarks.peer.report import Measurement, avx2_title, format_ratios, format_table, ratios
from benchmarks.peer.servers import COMMANDS, Server, ServerError, Target, can_serve, free_port
from benchmarks.peer.setup import (
    CMAKE_FLAGS,
    LLAMA_CPP_PYTHON,
    MENDS,
    OPENVINO,
    Peers,
    SetupError,
    locate,
    only_one,
    set_up,
)
from eventlm.errors import PullError
from eventlm.models.fetch.cache_folder import cache_folder

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
WARM_UP_OUTPUT_TOKENS = 16
#: Requests of a load, by clients: enough for a median, few enough for three rounds in half an hour.
NUM_REQUESTS = {1: 4, 8: 16, 32: 64}
LOAD_SECONDS = 900
#: Load average above which another program has a part in the figures.
IDLE_LOAD = 0.3


class Load(NamedTuple):
    """One run of `eventlm bench serve`."""

    num_clients: int
    num_requests: int
    output_tokens: int
    seed: int


def measured_load(num_clients: int, round_number: int) -> Load:
    """The load of a round. Its prompts are those of no other, and the same for all servers."""
    num_requests = NUM_REQUESTS.get(num_clients, 2 * num_clients)
    return Load(num_clients, num_requests, OUTPUT_TOKENS, seed=1000 * round_number + num_clients)


def warm_up_load(num_clients: int) -> Load:
    """What shows a server each size of batch before it is measured."""
    return Load(num_clients, num_clients, WARM_UP_OUTPUT_TOKENS, seed=num_clients)


def bench_command(load: Load, url: str, tokenizer: Path, output: Path) -> list[str]:
    """The command line of the load."""
    options: dict[str, str | int | Path] = {
        "--url": url,
        "--max-concurrency": load.num_clients,
        "--num-prompts": load.num_requests,
        "--input-len": PROMPT_TOKENS,
        "--output-len": load.output_tokens,
        "--tokenizer": tokenizer,
        "--seed": load.seed,
        "--timeout": LOAD_SECONDS,
        "--output": output,
    }
    parts = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "eventlm", "bench", "serve", *parts, "--ignore-eos", "--no-ceiling"]


def run_load(load: Load, url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Put a load on a server; its statistics. Raises ServerError if it cannot be done in bounded time."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = bench_command(load, url, tokenizer, Path(output) / "load")
        try:
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the load was not done after {LOAD_SECONDS} s") from None
        if run.returncode:
            raise ServerError(f"eventlm bench serve: exit code {run.returncode}: {run.stderr.strip()[-1000:]}")
        summary = json.loads((Path(output) / "load" / "summary.json").read_text())
    return dict(summary["statistics"])


def what_is_wrong(load: Load, statistics: dict[str, Any]) -> str:
    """Why these figures are not of the load that was asked for; empty if they are."""
    if statistics["num_success"] != load.num_requests:
        return f"{statistics['num_success']} of {load.num_requests} requests succeeded: {statistics['errors']}"
    for what, wanted in (("output", load.output_tokens), ("prompt", PROMPT_TOKENS)):
        found = statistics[f"{what}_tokens"] / load.num_requests
        if found != wanted:
            return f"{what}s of {found:g} tokens, not {wanted}"
    return ""


class Group:
    """The servers of one model in one precision, up at the same time."""

    def __init__(self, target: Target, arguments: argparse.Namespace, folder: Path) -> None:
        self._target = target
        self._clients: list[int] = arguments.clients
        self._num_rounds: int = arguments.rounds
        self._names = [name for name in arguments.servers if can_serve(name, target.precision, is_avx2=target.is_avx2)]
        self._folder = folder
        self._tokenizer = checkpoint(target.model, target.peers)
        self._servers: dict[str, Server] = {}

    def run(self) -> Iterator[Measurement]:
        """Start, warm up, measure in turns, and end the servers whatever happens."""
        with ExitStack() as stack:
            for name in self._names:
                self._start(name, stack)
            for number in range(1, self._num_rounds + 1):
                for num_clients in self._clients:
                    for name in rotated(self._names, number - 1):
                        yield self._measure(name, measured_load(num_clients, number), number)

    def _start(self, name: str, stack: ExitStack) -> None:
        say(f"start {name} with {self._target.model}, {self._target.precision}, and warm it up")
        try:
            server = Server(name, self._target._replace(port=free_port()), self._folder)
            stack.callback(server.stop)
            for num_clients in self._clients:
                run_load(warm_up_load(num_clients), server.url, self._tokenizer, self._folder)
        except (ServerError, SetupError) as error:
            say(f"{name} is left out: {error}")
        else:
            self._servers[name] = server

    def _measure(self, name: str, load: Load, number: int) -> Measurement:
        precision = self._target.precision
        title = avx2_title(precision) if self._target.is_avx2 else precision
        index = (self._target.model, title, name, load.num_clients, number)
        server = self._servers.get(name)
        if server is None:
            return Measurement(*index, 0.0, 0.0, 0.0, 0.0, wrong="the server did not start")
        try:
            statistics = run_load(load, server.url, self._tokenizer, self._folder)
            wrong = what_is_wrong(load, statistics)
        except ServerError as error:
            statistics, wrong = {}, str(error)
        if wrong:
            say(f"{name}: {wrong}; the end of its log:\n{server.log_tail()}")
        ttft, tpot = statistics.get("ttft_ms") or {}, statistics.get("tpot_ms") or {}
        rate = statistics.get("output_tokens_per_second", 0.0)
        figures = (rate, ttft.get("p50", 0.0), ttft.get("p99", 0.0), tpot.get("p50", 0.0))
        say(f"round {number}, {load.num_clients:>2} clients, {name:<13}{rate:8.1f} tok/s")
        return Measurement(*index, *figures, wrong=wrong)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, beginning with another one each time."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def say(line: str) -> None:
    """Progress; the tables alone go to the standard output."""
    print(line, file=sys.stderr, flush=True)


def host(load_before: float) -> dict[str, Any]:
    """What the figures are of. load_before: of the machine, before the servers were set up."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "num_processors": len(os.sched_getaffinity(0)),
        "load_before": load_before,
        "peers": [*OPENVINO, f"llama-cpp-python=={LLAMA_CPP_PYTHON}"],
        "cmake_flags": list(CMAKE_FLAGS),
        "mended": [mend.file for mend in MENDS],
    }


def measure(arguments: argparse.Namespace, peers: Peers, about: dict[str, Any]) -> list[Measurement]:
    """All groups, one after the other. The file, which begins with `about`, is written after each measurement, the
    tables after each group.
    """
    measurements: list[Measurement] = []
    for model in arguments.models:
        for precision in arguments.precision:
            target = Target(model, precision, max(arguments.clients), 0, peers, arguments.avx2)
            found: list[Measurement] = []
            with tempfile.TemporaryDirectory() as folder:
                for measurement in Group(target, arguments, Path(folder)).run():
                    found.append(measurement)
                    lines = [one._asdict() for one in (*measurements, *found)]
                    arguments.output.write_text(json.dumps({"host": about, "measurements": lines}, indent=1))
            print(f"\n{format_table(found)}", flush=True)
            if beside := ratios(found):
                print(f"\n{format_ratios(beside)}", flush=True)
            measurements += found
    return measurements


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["qwen3-0.6b", "smollm2"], default=["qwen3-0.6b", "smollm2"])
    precisions = [*OPENVINO_FORMATS, *GGUF_PRECISIONS]
    parser.add_argument("--precision", nargs="+", choices=precisions, default=["bf16", "int8"], metavar="PRECISION")
    parser.add_argument(
        "--avx2", action="store_true", help="hold eventlm and llama.cpp to AVX2, and leave OpenVINO out"
    )
    servers = ["eventlm", "openvino", "llama.cpp"]
    parser.add_argument("--servers", nargs="+", choices=list(COMMANDS), default=servers)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("peers.json"), help="file for the figures of every round")
    parser.add_argument("--setup-only", action="store_true", help="make what is missing, and measure nothing")
    arguments = parser.parse_args()
    if min(*arguments.clients, arguments.rounds) < 1:
        parser.error("--clients and --rounds must be at least 1")
    if not arguments.output.absolute().parent.is_dir():
        parser.error(f"--output {arguments.output}: its folder does not exist")
    return arguments


def prepare(arguments: argparse.Namespace, peers: Peers) -> bool:
    """Set the servers up and convert all that they will serve, so that nothing of it runs beside a measurement; False
    if some of it failed.
    """
    is_whole = True
    # GGUF files are made with the peers' tools, and served by eventlm as well.
    needs_tools = any(precision in GGUF_PRECISIONS for precision in arguments.precision)
    for name in arguments.servers:
        try:
            set_up("llama.cpp" if needs_tools else name, peers, is_avx2=arguments.avx2)
            for model in arguments.models:
                for precision in arguments.precision:
                    if can_serve(name, precision, is_avx2=arguments.avx2):
                        COMMANDS[name](Target(model, precision, 1, 0, peers))
        except SetupError as error:
            is_whole = False
            say(f"{name} cannot be set up: {error}")
    return is_whole


def main() -> int:
    """Set up, measure, print."""
    # Setting the servers up, which may compile, is load too.
    load_before = os.getloadavg()[0]
    arguments = parse_arguments()
    # Servers are ended in `finally` clauses, which a plain SIGTERM would pass over.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers = locate(cache_folder() / "peers")
    if load_before > IDLE_LOAD and not arguments.setup_only:
        say(f"the machine is not idle (load {load_before:.1f}): these figures are not to be trusted")
    try:
        with only_one(peers):
            is_whole = prepare(arguments, peers)
        if not arguments.setup_only:
            is_whole &= not any(one.wrong for one in measure(arguments, peers, host(load_before)))
    except PullError as error:
        # Of the model that all checkpoints are made of.
        say(f"peers.py: {error}")
        return 1
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
