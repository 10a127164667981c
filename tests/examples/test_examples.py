"""Every example runs as its page says. The fake model stands in for a real one."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.processes import PATIENCE_SECONDS
from tests.serving import run_command, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 60


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_batch(tmp_path: Path) -> None:
    lines = run_example("offline_batch.py", "fake", cwd=tmp_path).splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "'The capital of France is'",
        "'Once upon a time'",
        "'To make tea,'",
    ]
    assert all(line.endswith("(length)") for line in lines)


def test_structured_output(tmp_path: Path) -> None:
    said = run_example("structured_output.py", "fake", cwd=tmp_path)
    found = re.fullmatch(r"(?s).{3,} is (\d+) and drinks (?:tea|coffee|water)\.\n", said)
    assert found is not None
    assert 0 <= int(found[1]) <= 120


def test_resumable_stream(tmp_path: Path) -> None:
    with serve(tmp_path, "--model", "fake", "--resume-seconds", "60") as server:
        lost, whole = run_example("resumable_stream.py", server.url, cwd=tmp_path).splitlines()
        asked = {"prompt": "Count from one to ten:", "max_tokens": 40, "seed": 4, "ignore_eos": True}
        expected = server.complete(**asked).json()["choices"][0]["text"]
    begun = text_of(lost.partition("after ")[2])
    assert text_of(whole.partition("text: ")[2]) == expected
    assert expected.startswith(begun)
    assert 20 < len(begun) < len(expected)


def test_policy(tmp_path: Path) -> None:
    """Of requests that wait together, the one with the shortest prompt goes first, and the run verifies."""
    lengths = [400, 300, 100, 200]
    lines = [{"t": "workload", "format": 1, "source": "test"}]
    lines += [{"arrival_s": 0.001 * index, "prompt_tokens": n, "output_tokens": 8} for index, n in enumerate(lengths)]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = {"PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"}
    flags = (
        "--cost-model",
        "h200-llama3-8b",
        "--max-num-seqs",
        "1",
        "--policy",
        "shortest:Shortest",
        "--record",
        "runs",
    )
    done = run_command("simulate", "w.jsonl", *flags, cwd=tmp_path, **path)
    assert done.returncode == 0, done.stderr
    done = run_command("replay", "runs/latest", "--trust-local-plugins", cwd=tmp_path, **path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/latest/trace.jsonl").read_text().splitlines()]
    prompts = {event["s"]: event["prompt_tokens"] for event in events if event["t"] == "arrive"}
    assert [prompts[event["request"]] for event in events if event["t"] == "finish"] == [400, 100, 200, 300]


@pytest.mark.parametrize("name", ["what_if.ipynb"])
def test_notebooks(name: str, tmp_path: Path) -> None:
    """On the first sixth of the workload."""
    examples = shutil.copytree(EXAMPLES, tmp_path / "examples")
    script = examples / "bug_hunt" / "make_workload.py"
    shorter = script.read_text().replace("range(600)", "range(100)")
    assert shorter != script.read_text()
    script.write_text(shorter)
    notebook = nbformat.read(examples / name, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources={"metadata": {"path": str(examples)}})
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    assert re.search(r"ttft_p99: recorded [\d,]+ ms, edf [\d,]+ ms, lrs [\d,]+ ms \(error bar [\d,]+ ms\)", printed)
    assert any("image/png" in output.get("data", {}) for output in notebook.cells[-1]["outputs"])


def test_examples_stay_short() -> None:
    scripts = sorted(EXAMPLES.rglob("*.py"))
    assert {script.name for script in scripts} >= {"shortest.py", "offline_batch.py", "resumable_stream.py"}
    for script in scripts:
        assert len(script.read_text().splitlines()) <= MAX_LINES, script.name


def test_the_policy_on_the_page_is_the_example() -> None:
    page = (EXAMPLES.parent / "docs" / "policies.md").read_text()
    assert f"```python\n{(EXAMPLES / 'shortest.py').read_text()}```" in page


def text_of(text: str) -> str:
    """The string that a printed repr stands for."""
    value = ast.literal_eval(text)
    assert isinstance(value, str)
    return value
