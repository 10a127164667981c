from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.errors import UsageError
from eventlm.replay.shrink.stub import write_stub
from eventlm.replay.workload.file import save_workload
from tests.replay.made_workloads import COST
from tests.replay.shrink.planted import planted_workload

#: The longest prompt first.
BUGGY = """
from eventlm.core.plugin import Policy

class ByLength(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        return [-each.prompt_tokens for each in sequences]
"""
SLOW = 'max(ttft, prompt <= 256 and class == "") > 400ms'


def _pytest(path: Path) -> int:
    """The exit code of pytest alone, without the plug-ins that other tests need and that take seconds to load."""
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(path)]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=60, cwd=path.parent, env=environment)
    return ran.returncode


def test_it_fails_under_the_problem_and_passes_once_it_is_mended(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "mine.py").write_text(BUGGY)
    save_workload(tmp_path / "w" / "small.jsonl", planted_workload(12))
    stub = tmp_path / "test_small.py"
    options = {"policy": {"type": "mine:ByLength"}, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    write_stub(stub, tmp_path / "w" / "small.jsonl", SLOW, options, COST)
    assert "def test_small() -> None:" in stub.read_text()
    assert _pytest(stub) == 1
    (tmp_path / "mine.py").write_text(BUGGY.replace("-each", "each"))
    assert _pytest(stub) == 0


def test_a_plug_in_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("run", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "mine.py").write_text(BUGGY.replace("-each", "each"))
    save_workload(tmp_path / "tests" / "small.jsonl", planted_workload(12))
    monkeypatch.chdir(tmp_path / "run")
    stub = tmp_path / "tests" / "test_small.py"
    options = {"policy": {"type": "mine:ByLength"}, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    write_stub(stub, tmp_path / "tests" / "small.jsonl", SLOW, options, COST)
    assert str(tmp_path) not in stub.read_text()
    # A plug-in that is not found would be a failure too.
    assert _pytest(stub) == 0


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the test"):
        write_stub(tmp_path / "none" / "test_it.py", tmp_path / "w.jsonl", SLOW, {}, COST)
