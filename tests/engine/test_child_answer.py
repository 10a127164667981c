"""A question to a process: its answer, its exit status, and that nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.engine.child_answer import COMPLAINT_BYTES, ask_child
from eventlm.system.processes import SystemProcesses
from tests.engine.test_explanations import mine


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stub_child.py").write_text(
        "import sys, time\n"
        "question = sys.stdin.read()\n"
        "print(question.upper(), flush=True)\n"
        "print('x' * 1_000_000, 'and a reason', file=sys.stderr)\n"
        "time.sleep(600 if question == 'wait' else 0)\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stub_child"


async def test_it_answers(module: str) -> None:
    before = mine()
    answer = await ask_child(SystemProcesses(), module, b"who", timeout_seconds=60)
    assert answer[:2] == (b"WHO\n", 3)
    assert answer.complaint.endswith("x and a reason")
    assert len(answer.complaint) < COMPLAINT_BYTES
    assert mine() == before


async def test_one_that_reads_nothing_says_why() -> None:
    answer = await ask_child(SystemProcesses(), "eventlm.no_such_module", b"x" * 1_000_000, timeout_seconds=60)
    assert (answer.data, answer.exit_code) == (b"", 1)
    assert "No module named eventlm.no_such_module" in answer.complaint


async def test_its_time_is_limited(module: str) -> None:
    before = mine()
    with pytest.raises(TimeoutError):
        await ask_child(SystemProcesses(), module, b"wait", timeout_seconds=0.2)
    assert mine() == before
