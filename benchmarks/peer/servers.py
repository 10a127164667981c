"""Starts and ends the servers of the benchmark beside peers, each with the settings that serve it best.

eventlm runs as users start it, recording included. The peers get a slot for every client, as many threads as there are
processors, and no cache of prefixes: no two prompts of the load share one.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.peer.checkpoints import (
    GGUF_PRECISIONS,
    GGUF_TYPES,
    OPENVINO_FORMATS,
    ModelName,
    Precision,
    checkpoint,
    gguf_model,
    openvino_model,
)
from benchmarks.peer.setup import Peers, log_tail

START_SECONDS = 300.0
STOP_SECONDS = 40.0
#: More than a request of the load takes, prompt and output, for a prompt may miss its length by a token or two.
CONTEXT_TOKENS = 256
OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")


class Target(NamedTuple):
    """What a server is started for. `num_clients` is the most at once; with `is_avx2` no wider vectors are used.
    `context_tokens`: of each client, in llama.cpp.
    """

    model: ModelName
    precision: Precision
    num_clients: int
    port: int
    peers: Peers
    is_avx2: bool = False
    context_tokens: int = CONTEXT_TOKENS


class ServerError(Exception):
    """A server did not start, or went away; the message has the end of its log."""


def eventlm_command(target: Target) -> list[str]:
    """`eventlm serve`, all its options at their defaults. Runs are recorded in the working folder."""
    path = checkpoint(target.model, target.peers)
    if target.precision in GGUF_PRECISIONS:
        path = gguf_model(target.model, target.precision, path, target.peers)
    command = [sys.executable, "-m", "eventlm", "serve", str(path), "--port", str(target.port), "--record", "runs"]
    if target.precision in ("int8", "int4"):
        command += ["--quantization", target.precision]
    return [*command, "--cpu-kernels", "avx2"] if target.is_avx2 else command


def openvino_command(target: Target) -> list[str]:
    """OpenVINO GenAI's pipeline behind HTTP; its KV cache is of 8 bits, its default."""
    source = checkpoint(target.model, target.peers)
    folder = openvino_model(target.model, target.precision, source, target.peers)
    command = [str(target.peers.python), str(OPENVINO_SERVER), str(folder), "--port", str(target.port)]
    return [*command, "--weights", target.precision]


def small_steps_command(target: Target) -> list[str]:
    """The same with steps of at most 256 tokens, its default: first tokens come sooner, all others later."""
    return [*openvino_command(target), "--max-num-batched-tokens", "256"]


def llama_command(target: Target) -> list[str]:
    """llama.cpp's own server. Its copies of finished prompts' KV in memory would cost it time and find nothing."""
    source = checkpoint(target.model, target.peers)
    file = gguf_model(target.model, target.precision, source, target.peers)
    num_threads = len(os.sched_getaffinity(0))
    options: dict[str, str | int] = {
        "--model": str(file),
        "--port": target.port,
        "--parallel": target.num_clients,
        "--ctx-size": target.context_tokens * target.num_clients,
        "--threads": num_threads,
        "--threads-batch": num_threads,
        "--flash-attn": "auto",
        "--cache-ram": 0,
    }
    flags = ["--cont-batching", "--no-cache-prompt", "--no-webui"]
    program = str(target.peers.llama_program("llama-server"))
    command = [program, *(str(part) for option in options.items() for part in option), *flags]
    return ["env", f"LD_LIBRARY_PATH={target.peers.llama_avx2_libraries}", *command] if target.is_avx2 else command


#: By the name that tables and --servers use; the first is what the others are compared with.
COMMANDS: dict[str, Callable[[Target], list[str]]] = {
    "eventlm": eventlm_command,
    "openvino": openvino_command,
    "openvino-256": small_steps_command,
    "llama.cpp": llama_command,
}


def can_serve(name: str, precision: Precision, *, is_avx2: bool) -> bool:
    """Whether a server has that precision, and vectors no wider than AVX2's if it is to."""
    if name.startswith("openvino"):
        return precision in OPENVINO_FORMATS and not is_avx2
    return name == "eventlm" or precision in GGUF_TYPES


class Server:
    """A server's process group, from its start to its end. Raises ServerError if it does not answer in time."""

    def __init__(self, name: str, target: Target, folder: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{target.port}"
        self._log = folder / f"{name}.log"
        work = folder / name
        work.mkdir(parents=True, exist_ok=True)
        command = COMMANDS[name](target)
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=work,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The end of what it has printed."""
        return log_tail(self._log)

    def stop(self) -> None:
        """End it and all that it started, in order if it can."""
        if self.is_alive():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if not self.is_alive():
                raise ServerError(f"it ended with exit code {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"it does not answer after {START_SECONDS:.0f} s:\n{self.log_tail()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        """A list of models comes before the model is loaded from one of them, so its health is asked for too."""
        try:
            for path in ("/health", "/v1/models"):
                with urlopen(self.url + path, timeout=5):
                    pass
        except (URLError, OSError, http.client.HTTPException):
            return False
        return True


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
