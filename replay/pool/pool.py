"""Runs specifications in processes, one for each job. They exchange JSON, no pickle."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

_MAX_ERROR_CHARACTERS = 300

Spec = TypeVar("Spec", bound=Struct)
Result = TypeVar("Result", bound=Struct)


class ProcessPool(Generic[Spec, Result]):
    """Processes that live from the first call of `run` until the end of the `with` block, which kills them.

    module: each process is `python -m module`, which calls `eventlm.replay.pool.serve.serve`. failed: makes a result of
    what went wrong with a process.
    """

    def __init__(
        self, module: str, result_type: type[Result], failed: Callable[[str], Result], *, num_jobs: int
    ) -> None:
        self._module = module
        self._result_type = result_type
        self._failed = failed
        self._num_jobs = num_jobs
        self._waiting: queue.SimpleQueue[Spec | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Spec, Result]] = queue.SimpleQueue()
        self._jobs: list[_Job[Spec, Result]] = []

    def run(
        self, specs: Sequence[Spec], on_result: Callable[[Spec, Result], None], *, timeout_s: float | None = None
    ) -> None:
        """Run them in the given order. `on_result` is called in this thread.

        A process that dies fails its specification and is replaced. Raises TimeoutError after `timeout_s`: all
        processes are then killed, and what has no result yet never gets one.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        for spec in specs:
            self._waiting.put(spec)
        while len(self._jobs) < min(self._num_jobs, len(specs)):
            job = _Job(self._module, self._result_type, self._failed, self._waiting, self._finished)
            self._jobs.append(job)
            job.start()
        for _ in specs:
            try:
                found = self._finished.get(timeout=None if ends is None else max(ends - time.monotonic(), 0))
            except queue.Empty:
                self._end()
                raise TimeoutError from None
            on_result(*found)

    def _end(self) -> None:
        for job in self._jobs:
            job.stop()
        for _ in self._jobs:
            self._waiting.put(None)
        for job in self._jobs:
            job.join()
        self._jobs = []
        self._waiting, self._finished = queue.SimpleQueue(), queue.SimpleQueue()

    def __enter__(self) -> ProcessPool[Spec, Result]:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()


class _Job(threading.Thread, Generic[Spec, Result]):
    """Feeds one process at a time, until it takes None."""

    def __init__(
        self,
        module: str,
        result_type: type[Result],
        failed: Callable[[str], Result],
        waiting: queue.SimpleQueue[Spec | None],
        finished: queue.SimpleQueue[tuple[Spec, Result]],
    ) -> None:
        super().__init__(name="eventlm-pool", daemon=True)
        self._module = module
        self._result_type = result_type
        self._failed = failed
        self._waiting = waiting
        self._finished = finished
        self._process: subprocess.Popen[bytes] | None = None
        #: Held while a process is started or killed, so that none is started after `stop`.
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self) -> None:
        # The process shares the position in the file, so it must not be buffered here.
        with tempfile.TemporaryFile(buffering=0) as errors:
            while not self._is_stopped:
                spec = self._waiting.get()
                if spec is None:
                    break
                try:
                    result = self._ask(spec, errors.fileno())
                except (OSError, msgspec.MsgspecError) as error:
                    result = self._failed(f"its process failed: {error}")
                if result is None:
                    errors.seek(0)
                    result = self._failed(self._describe_death(errors.read()))
                errors.seek(0)
                errors.truncate()
                self._finished.put((spec, result))
        self.stop()

    def _ask(self, spec: Spec, errors_fd: int) -> Result | None:
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
        return msgspec.json.decode(line, type=self._result_type) if line.endswith(b"\n") else None

    def _ensure_process(self, errors_fd: int) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._is_stopped:
                command = (sys.executable, "-m", self._module)
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors_fd
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
