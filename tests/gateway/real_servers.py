"""Servers of other makers, as users run them, for tests of what stands before them.

The peers of the benchmark are used as they are (`python benchmarks/peers.py --setup-only` makes them), vLLM by the
command in VLLM or on the path. All serve the default model under one name. What is not there is skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from benchmarks.peer.servers import OPENVINO_SERVER, free_port
from benchmarks.peer.setup import locate, log_tail
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.fetch.default_model import DEFAULT_MODEL
from eventlm.models.fetch.pull import cached
from tests.models.families.proof import STABLE_BUILD
from tests.processes import wait_until
from tests.serving import command

ServerName = Literal["llama.cpp", "eventlm", "openvino", "vllm"]
NAMES: tuple[ServerName, ...] = get_args(ServerName)
MODEL = DEFAULT_MODEL
CONTEXT_TOKENS = 2048
SLOTS = 4
#: vLLM imports torch and more, which takes minutes where the processor is busy.
START_SECONDS = 600.0
#: The user's own, which tests do not see while they run.
PEERS = locate(cache_folder() / "peers")
SETUP = "run `python benchmarks/peers.py --setup-only --models smollm2`"


class RealServer:
    """One server in a process group of its own, ready once `wait_ready` has returned."""

    def __init__(self, name: ServerName, folder: Path) -> None:
        port = free_port()
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{name}-{port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _command(name, port),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | _ENVIRONMENT.get(name, {}),
            )

    def wait_ready(self) -> None:
        """A list of models may come before the model is loaded, so its health is asked for too."""

        def answers() -> bool:
            assert self._process.poll() is None, log_tail(self._log)
            try:
                for path in ("/health", "/v1/models"):
                    with urlopen(self.url + path, timeout=5):
                        pass
            except (URLError, OSError):
                return False
            return True

        wait_until(answers, seconds=START_SECONDS)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End it, whatever state it is in."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def real_servers(folder: Path, *names: ServerName) -> Iterator[list[RealServer]]:
    """Servers that are ready. Skips the test if one of them is not there."""
    servers: list[RealServer] = []
    try:
        for name in names:
            servers.append(RealServer(name, folder))
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.close()


_ENVIRONMENT = {
    "vllm": {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
}


def _command(name: ServerName, port: int) -> list[str]:
    at = ["--port", str(port)]
    match name:
        case "llama.cpp":
            return [*_llama_command(), *at]
        case "eventlm":
            # One processor of two is left for the other servers.
            flags = ["--no-record", "--max-model-len", str(CONTEXT_TOKENS), "--cpu-kernels", STABLE_BUILD]
            return [*command("serve", *flags), *at, "--log-level", "warning"]
        case "openvino":
            folder = PEERS.folder / "models" / "smollm2" / "openvino-bf16"
            _need(folder, SETUP)
            return [str(PEERS.python), str(OPENVINO_SERVER), str(folder), *at]
        case "vllm":
            program = shutil.which(os.environ.get("VLLM", "vllm"))
            if program is None:
                pytest.skip("no command `vllm`: install vLLM for this processor, or name its command in VLLM")
            checkpoint = cached(f"{MODEL}:bf16")
            assert checkpoint is not None
            flags = ["--max-model-len", str(CONTEXT_TOKENS), "--served-model-name", MODEL, "--enforce-eager"]
            tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
            return [program, "serve", str(checkpoint), *flags, *tools, "--host", "127.0.0.1", *at]


def _llama_command() -> list[str]:
    program = PEERS.llama_program("llama-server")
    _need(program, SETUP)
    folder = cached(MODEL)
    assert folder is not None
    [model] = folder.glob("*.gguf")
    options = {
        "--model": model,
        "--alias": MODEL,
        "--parallel": SLOTS,
        "--ctx-size": SLOTS * CONTEXT_TOKENS,
        "--threads": 1,
        "--threads-batch": 1,
    }
    return [str(program), *(str(part) for option in options.items() for part in option), "--metrics"]


def _need(path: Path, remedy: str) -> None:
    if not path.exists():
        pytest.skip(f"{path} is not there: {remedy}")
