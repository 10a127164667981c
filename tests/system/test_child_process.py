from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.system.child_process import last_line, run_child


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_script_gets_its_arguments_and_a_folder_for_temporary_files(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import os, sys; print(*sys.argv[1:]); print(os.environ['TMPDIR'], file=sys.stderr); exit(3)"
    )
    said: list[str] = []
    ended = run_child(path, "one", "two", folder=tmp_path, on_poll=said.append)
    assert (ended.code, ended.output, said[-1]) == (3, "one two\n", ended.output)
    scratch = Path(ended.errors.strip())
    assert scratch.parent == tmp_path
    assert not scratch.exists()


def test_a_module_may_be_run_with_other_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said.py").write_text("import os; print(os.environ['SAID'], __name__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_child("said", environment={"SAID": "yes"}).output == "yes __main__\n"


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    path = script(
        tmp_path,
        "import time\n"
        f"fifo = open({str(tmp_path / 'alive')!r}, 'w')\n"
        "print('runs', file=fifo, flush=True)\n"
        "time.sleep(20)\n"
        "print('lived on', file=fifo)\n",
    )
    program = f"from eventlm.system.child_process import run_child; run_child({str(path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", program])
    with (tmp_path / "alive").open() as fifo:
        assert fifo.readline() == "runs\n"
        parent.kill()
        parent.wait()
        assert fifo.read() == ""


def test_what_is_said_of_one_that_failed() -> None:
    assert last_line("first\nERROR: no network\n\n", 1) == "no network"
    assert last_line("", 2) == "exit status 2"
    assert last_line("loading\n", -signal.SIGKILL) == "killed by signal 9 (out of memory?)"
    assert last_line("", -signal.SIGTERM) == "killed by signal 15"
