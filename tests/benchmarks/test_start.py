"""Every benchmark starts as README names it, `python benchmarks/NAME.py`, from the repository's root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import start

ROOT = Path(__file__).parents[2]
#: Runs each script with --help as the interpreter would, its folder and not the root in front of the path. It is one
#: process, since each would load the same libraries again.
PROGRAM = """
import pathlib, runpy, sys
import eventlm
root, *scripts = sys.argv[1:]
path = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != pathlib.Path(root)]
for script in scripts:
    sys.path[:] = [root + "/benchmarks", *path]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "benchmarks")]:
        del sys.modules[name]
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
        print("no --help:", script, file=sys.stderr)
    except SystemExit as end:
        print(script, end.code)
    except Exception as error:
        print(script, repr(error), file=sys.stderr)
"""


def test_every_benchmark_starts() -> None:
    scripts = [
        f"benchmarks/{path.name}"
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        if '__name__ == "__main__"' in path.read_text()
    ]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT), *scripts], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    assert [line for script in scripts if (line := f"{script} 0") not in run.stdout.splitlines()] == []


def test_the_worker_of_a_server_and_the_most_that_it_has_held() -> None:
    """Its command line distinguishes it from other processes. Memory that it has freed counts too."""
    program = "import sys; held = bytearray(80_000_000); del held; print(flush=True); sys.stdin.read()"
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
        subprocess.Popen([sys.executable, "-c", program, "eventlm.worker.process"], **pipes) as worker,
    ):
        assert worker.stdout is not None
        worker.stdout.readline()
        assert start.worker_of(os.getpid()) == worker.pid
        assert 80e6 < start.peak_bytes(worker.pid) < 180e6
        for process in (other, worker):
            process.communicate(b"\n")


def test_no_rounds_are_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["start.py", "--rounds", "0"])
    with pytest.raises(SystemExit) as ended:
        start.main()
    assert ended.value.code == 2
    assert "--rounds is 1 at least" in capsys.readouterr().err
