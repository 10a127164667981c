"""`LLM` in a Jupyter kernel, where a loop runs already and Ctrl-C is the stop button."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.serving import fake_text, verified

Message = dict[str, Any]


class Notebook:
    """A kernel in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
        self.manager.start_kernel(cwd=str(folder))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_SECONDS)

    def run(self, cell: str, on_output: Callable[[str], None] | None = None) -> tuple[str, str, str]:
        """Status of a cell, what it printed, and what else it showed."""
        printed: dict[str, list[str]] = {"stdout": [], "stderr": []}

        def take(message: Message) -> None:
            if message["msg_type"] == "stream":
                content = message["content"]
                printed[content["name"]].append(content["text"])
                if on_output is not None:
                    on_output(content["text"])

        reply = self.client.execute_interactive(cell, timeout=PATIENCE_SECONDS, output_hook=take)
        content = reply["content"]
        return content.get("ename", content["status"]), "".join(printed["stdout"]), "".join(printed["stderr"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def test_cells(notebook: Notebook, tmp_path: Path) -> None:
    status, out, _ = notebook.run(
        "import asyncio; asyncio.get_running_loop()\n"
        "from eventlm import LLM, SamplingParams\n"
        "llm = LLM('fake', record='runs', fake={'base_ns': 2_000_000})\n"
        "params = SamplingParams(seed=5, max_tokens=12)\n"
        "print(*llm._composition.engine.worker_pids)"
    )
    assert status == "ok"
    pids = [int(pid) for pid in out.split()]
    call = "print(llm.generate('Hi', params)[0].outputs[0].text)"
    status, out, err = notebook.run(call)
    assert (status, out) == ("ok", fake_text(5, 12) + "\n")
    assert "Processed prompts: 100%" in err

    def interrupt(text: str) -> None:
        if text.startswith("working"):
            notebook.manager.interrupt_kernel()

    long_call = (
        "import tqdm\n"
        "class Bar(tqdm.tqdm):\n"
        "    def update(self, n=1): print('working', flush=True)\n"
        "llm.generate(['a', 'b'], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=8000)], use_tqdm=Bar)"
    )
    assert notebook.run(long_call, interrupt)[0] == "KeyboardInterrupt"
    assert notebook.run(call)[:2] == ("ok", fake_text(5, 12) + "\n")
    notebook.client.shutdown()
    wait_until(lambda: not notebook.manager.is_alive())
    wait_until(lambda: not any(map(is_running, pids)))
    assert verified(tmp_path / "runs" / "latest" / "trace.jsonl").result.clean_end
