"""A worker process that has no setup yet.

Its libraries take it longer to load than the engine's process takes to find out what it is to do. So a command that
will need workers spawns them first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from eventlm.system.parent_pipe import PipeError
from eventlm.system.pipes import ParentPipe
from eventlm.system.processes import Process
from eventlm.system.system import System

#: Of a worker, unless the engine's environment has other values: compute threads that sleep while they wait, because
#: threads that spin on a core which this process needs slow a step down tenfold, and GPUs in the order of NVML.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}


class SpawnedWorker(NamedTuple):
    """A process that waits for its setup. It shares no memory and no open file with this one."""

    pipe: ParentPipe
    process: Process

    def kill(self) -> None:
        """Send SIGKILL; the pipe stays open. Harmless when called twice."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


async def spawn_worker(system: System, *libraries: str) -> SpawnedWorker:
    """Spawn a process that imports these modules before it takes its setup. Raises OSError or PipeError."""
    pipe, processes = system.pipes.open(), system.processes
    try:
        process = await processes.spawn(
            "eventlm.worker.process",
            *pipe.addresses,
            str(processes.pid),
            *libraries,
            # What a library prints is no output of this program, and is logged like its other lines.
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            environment=ENVIRONMENT,
        )
    except BaseException:
        pipe.close()
        raise
    return SpawnedWorker(pipe, process)


@contextlib.asynccontextmanager
async def spawned_ahead(system: System, count: int, *libraries: str) -> AsyncIterator[Sequence[SpawnedWorker]]:
    """Worker processes for the start of an engine. Those that still run end with the context.

    If they cannot be spawned there are fewer, and the start reports why.
    """
    workers: list[SpawnedWorker] = []
    try:
        with contextlib.suppress(OSError, PipeError):
            for _ in range(count):
                workers.append(await spawn_worker(system, *libraries))
        yield workers
    finally:
        # All of them before the first wait, which a second Ctrl-C may interrupt.
        for worker in workers:
            worker.kill()
        try:
            for worker in workers:
                await worker.process.wait()
        finally:
            for worker in workers:
                worker.pipe.close()
