"""Runs a section in processes of its own and reads what it finds, whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from benchmarks.gpu_harness.row import Context, Row
from benchmarks.gpu_harness.run_one import DEVICE_LOST, Began, Line
from benchmarks.gpu_harness.section import Section
from eventlm.formatting import death_in_words

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1
#: Less than this is not worth another process.
LEAST_SECONDS = 5.0
#: A worker looks this often whether the process that it belongs to is there, and gives its memory back if not.
ORPHAN_SECONDS = 3.0


class Limits(NamedTuple):
    """Seconds after which a section, and a part of it, is ended."""

    section: float
    part: float


def run_section(section: Section, context: Context, limits: Limits) -> Iterator[Row]:
    """Yield a section's rows as they come. If a part ends its process, a new process goes on with the next part."""
    deadline = time.monotonic() + limits.section
    while True:
        attempt = _Attempt(context, deadline, limits)
        try:
            for row in attempt.run():
                yield structs.replace(row, section=section.name)
        finally:
            attempt.end()
        if attempt.failure:
            yield Row(section=section.name, what=attempt.part or "all", outcome="failed", note=attempt.failure)
        if attempt.is_done or not attempt.begun:
            return
        if deadline - time.monotonic() < LEAST_SECONDS:
            yield Row(section=section.name, what="what comes after it", outcome="skipped", note="no time is left")
            return
        context = structs.replace(context, skip=[*context.skip, *attempt.begun])


class _Attempt:
    """One process. `begun`: the parts that it came to. `failure`: why it was ended, or what ended it."""

    def __init__(self, context: Context, deadline: float, limits: Limits) -> None:
        self.begun: list[str] = []
        self.failure = ""
        self.is_done = False
        self._deadline, self._limits = deadline, limits
        folder = Path(context.folder)
        request = folder / f"{context.module}.context.json"
        request.write_bytes(msgspec.json.encode(context))
        self._output = folder / f"{context.module}.{len(context.skip)}.jsonl"
        self._output.touch()
        command = [sys.executable, "-m", "benchmarks.gpu_harness.run_one", str(request), str(self._output)]
        # What the section says is beside the progress; the table alone goes to the standard output.
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(smoke=context.smoke),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )

    @property
    def part(self) -> str:
        """The last one that began; empty if none did."""
        return self.begun[-1] if self.begun else ""

    def run(self) -> Iterator[Row]:
        """What it finds, until it has ended or is to be ended."""
        with self._output.open("rb") as lines:
            part_began, partial = time.monotonic(), b""
            while True:
                has_ended = self._process.poll() is not None
                while line := lines.readline():
                    partial += line
                    if not partial.endswith(b"\n"):
                        break
                    found, partial = msgspec.json.decode(partial, type=Line), b""
                    if isinstance(found, Began):
                        self.begun.append(found.part)
                        part_began = time.monotonic()
                    else:
                        yield found.row
                if has_ended:
                    self._judge(self._process.returncode)
                    return
                now = time.monotonic()
                if now > self._deadline:
                    self.failure = f"not done after the section's {self._limits.section:.0f} s"
                    return
                if self.begun and now - part_began > self._limits.part:
                    self.failure = f"not done after {self._limits.part:.0f} s"
                    return
                time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End it, and what it has started, if it has not ended."""
        is_ended = self._process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not is_ended:
            time.sleep(ORPHAN_SECONDS)

    def _judge(self, exit_code: int) -> None:
        self.is_done = exit_code == 0
        if exit_code not in (0, DEVICE_LOST):
            self.failure = f"the process {death_in_words(exit_code)}"


def environment(*, smoke: bool) -> dict[str, str]:
    """Of processes that import this repository's code from its source tree."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if smoke:
        # Where there is a GPU too: the smoke test is the same everywhere.
        changed |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | changed
