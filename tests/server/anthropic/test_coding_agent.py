"""A coding agent, Claude Code without its terminal, works with the server as with Anthropic's.

Skipped without the program, which `npm install --global @anthropic-ai/claude-code` installs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.engine.request import Request
from tests.processes import PATIENCE_SECONDS
from tests.server.conftest import RunningServer
from tests.serving import serve

CLAUDE = shutil.which("claude")
pytestmark = [pytest.mark.soak, pytest.mark.skipif(CLAUDE is None, reason="needs the program claude")]


def ask(url: str, folder: Path, question: str, *flags: str, model: str = "test", **variables: str) -> list[Any]:
    """What the agent reports of one question, which it answers in a folder."""
    assert CLAUDE is not None
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **variables,
    }
    ended = subprocess.run(
        [CLAUDE, "-p", question, "--output-format", "stream-json", "--verbose", *flags],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.stdout, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_tools_are_called_and_answered(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start_server(max_body_bytes=16 << 20, reasoning_parser="qwen3")
    server.engine.max_model_len = 1 << 20
    path = tmp_path / "work" / "hello.txt"
    calls = [
        {"name": "Write", "arguments": {"file_path": str(path), "content": "Hello, world\n"}},
        {"name": "Read", "arguments": {"file_path": str(path)}},
    ]

    def say(request: Request, index: int) -> list[list[int]]:
        num_done = prompt(server, request).count("<tool_response>")
        text = "<think>What is next?</think>"
        if num_done < len(calls):
            text += f"Step {num_done}.\n<tool_call>\n{json.dumps(calls[num_done])}\n</tool_call>"
        else:
            text += "All done."
        return [[byte] for byte in text.encode()]

    server.engine.script = say
    events = ask(server.url, tmp_path, "Write hello.txt and read it.", "--allowedTools", "Write,Read")
    assert path.read_text() == "Hello, world\n"
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"] * 2 + ["thinking", "text"]
    result = events[-1]
    assert (result["type"], result["is_error"], result["result"]) == ("result", False, "All done.")
    assert result["num_turns"] == 3
    # Each prompt begins with the one before, so the prefix cache has it.
    first, second, third = (prompt(server, request) for request in server.engine.requests)
    assert second.startswith(first)
    assert third.startswith(second)
    assert "Hello, world" in third[len(second) :]


def prompt(server: RunningServer, request: Request) -> str:
    return str(server.context.tokenizer.decode(request.prompt_token_ids))


def test_with_the_fake_model(tmp_path: Path) -> None:
    fast = "base_ns=100000,prefill_token_ns=0,decode_ns=0,context_token_ns=0"
    flags = ("--model", "fake", "--max-model-len", "200000", "--num-blocks", "20000", "--fake", fast)
    with serve(tmp_path, *flags) as server:
        events = ask(server.url, tmp_path, "Hello", model=server.model, CLAUDE_CODE_MAX_OUTPUT_TOKENS="64")
        result = events[-1]
        assert result["type"] == "result", result
        assert server.figure("vllm:request_success_total") > 0


def test_a_prompt_that_is_too_long(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """The agent knows the error by its words."""
    server = start_server(max_body_bytes=16 << 20)
    server.engine.max_model_len = 4096
    result = ask(server.url, tmp_path, "Hello")[-1]
    assert result["is_error"]
    assert "prompt is too long" in result["result"].lower()
