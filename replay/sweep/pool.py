"""Runs cells in processes, one for each job. They exchange JSON, no pickle."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

import msgspec

from eventlm.replay.sweep.cell import CellResult, CellSpec

_COMMAND = (sys.executable, "-m", "eventlm.replay.sweep.worker")
_MAX_ERROR_CHARACTERS = 300

OnResult = Callable[[CellSpec, CellResult], None]


def run_cells(specs: Sequence[CellSpec], *, num_jobs: int, on_result: OnResult) -> None:
    """Run cells in the given order. `on_result` is called in this thread.

    A process that dies fails its cell and is replaced. An exception in this call ends the processes.
    """
    waiting: queue.SimpleQueue[CellSpec] = queue.SimpleQueue()
    for spec in specs:
        waiting.put(spec)
    finished: queue.SimpleQueue[tuple[CellSpec, CellResult]] = queue.SimpleQueue()
    jobs = [_Job(waiting, finished) for _ in range(min(num_jobs, len(specs)))]
    try:
        for job in jobs:
            job.start()
        for _ in specs:
            on_result(*finished.get())
    finally:
        for job in jobs:
            job.stop()
        for job in jobs:
            job.join()


class _Job(threading.Thread):
    """Feeds one process at a time."""

    def __init__(
        self, waiting: queue.SimpleQueue[CellSpec], finished: queue.SimpleQueue[tuple[CellSpec, CellResult]]
    ) -> None:
        super().__init__(name="eventlm-sweep", daemon=True)
        self._waiting = waiting
        self._finished = finished
        self._process: subprocess.Popen[bytes] | None = None
        #: Held while a process is started or killed, so that none is started after `stop`.
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self) -> None:
        with tempfile.TemporaryFile() as errors:
            while not self._is_stopped:
                try:
                    spec = self._waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    result = self._ask(spec, errors.fileno())
                except (OSError, msgspec.MsgspecError) as error:
                    result = CellResult(error=f"its process failed: {error}")
                if result is None:
                    errors.seek(0)
                    result = CellResult(error=self._describe_death(errors.read()))
                    errors.truncate(0)
                self._finished.put((spec, result))
        self.stop()

    def _ask(self, spec: CellSpec, errors_fd: int) -> CellResult | None:
        """The result from the process; None if it died."""
        process = self._ensure_process(errors_fd)
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        line = process.stdout.readline()
        return msgspec.json.decode(line, type=CellResult) if line.endswith(b"\n") else None

    def _ensure_process(self, errors_fd: int) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._is_stopped:
                self._process = subprocess.Popen(
                    _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors_fd
                )
            return self._process

    def _describe_death(self, errors: bytes) -> str:
        with self._lock:
            process, self._process = self._process, None
        code = _close(process) if process is not None else 0
        lines = errors.decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:_MAX_ERROR_CHARACTERS]}" if lines else ""
        return f"its process died ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}){said}"

    def stop(self) -> None:
        """Kill the process."""
        with self._lock:
            self._is_stopped = True
            process = self._process
            if process is not None:
                process.kill()
        if process is not None and threading.current_thread() is self:
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that has ended or is ending, and close its pipes."""
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue
    return code
