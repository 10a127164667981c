"""Whether a kernel reads or writes memory that is not its own, by CUDA's compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

from benchmarks.gpu_harness.row import Context, Parts, Row, SectionError, Skip, check

TOOL = "compute-sanitizer"
#: It comes with the CUDA toolkit, which need not be on the PATH.
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
#: torch looks for functions that a driver may lack, which is no error of a kernel; it takes its time to begin.
_OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--launch-timeout", "0")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"memcheck": lambda: _measure(context)}


def find_tool(environment: Mapping[str, str]) -> str | None:
    """On the PATH, or in a toolkit: that of CUDA_HOME, then those at the usual places."""
    toolkits = (environment.get("CUDA_HOME", ""), *_TOOLKITS)
    folders = [environment.get("PATH", ""), *(f"{toolkit}/bin" for toolkit in toolkits if toolkit)]
    return shutil.which(TOOL, path=os.pathsep.join(folders))


def _measure(context: Context) -> Iterator[Row]:
    tool = find_tool(os.environ)
    if context.smoke or tool is None:
        raise Skip("the interpreter checks addresses itself" if context.smoke else f"{TOOL} is not installed")
    command = [tool, *_OPTIONS, sys.executable, "-m", "benchmarks.gpu_sections.kernels_once"]
    # Each tensor an allocation of its own, or what lies beyond one is another's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    summary = _SUMMARY.search(run.stdout)
    if summary is None or " cases ran" not in run.stdout:
        raise SectionError(f"{TOOL} did not get to the end: {(run.stdout + run.stderr).strip()[-300:]}")
    lines = run.stdout.splitlines()
    errors = [line for line in lines if "Invalid" in line]
    note = errors[0] if errors else next(line for line in lines if " cases ran" in line)
    yield check("errors found by memcheck", int(summary[1]), "", at_most=0, note=note)
