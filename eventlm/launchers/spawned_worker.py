"""A worker process that has no setup yet.

Its libraries take it longer to load than the engine's process takes to find out what it is to do. So a command that
will need workers spawns them first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from eventlm.launchers.launcher import RankProcess, StartedRank
from eventlm.system.parent_pipe import PipeError
from eventlm.system.processes import KEEPER_VARIABLE
from eventlm.system.system import System

#: Of a worker, unless the engine's environment has other values: compute threads that sleep while they wait, because
#: threads that spin on a core which this process needs slow a step down tenfold, and GPUs in the order of NVML.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}


async def spawn_worker(system: System, *libraries: str) -> StartedRank:
    """Spawn a process that imports these modules before it takes its setup. Raises OSError or PipeError.

    It shares no memory and no open file with this one.
    """
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
            environment=ENVIRONMENT | {KEEPER_VARIABLE: str(processes.keeper_pid)},
        )
    except BaseException:
        pipe.close()
        raise
    return StartedRank(pipe, process)


def kill_process(process: RankProcess) -> None:
    """Send SIGKILL. Harmless when called twice."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def kill_and_close(ranks: Sequence[StartedRank]) -> None:
    """End these processes, and close their pipes."""
    # All of them before the first wait, which a second Ctrl-C may interrupt.
    for rank in ranks:
        kill_process(rank.process)
    try:
        for rank in ranks:
            await rank.process.wait()
    finally:
        for rank in ranks:
            rank.pipe.close()


@contextlib.asynccontextmanager
async def spawned_ahead(system: System, count: int, *libraries: str) -> AsyncIterator[Sequence[StartedRank]]:
    """Worker processes for the start of an engine. Those that still run end with the context.

    If they cannot be spawned there are fewer, and the start reports why.
    """
    workers: list[StartedRank] = []
    try:
        with contextlib.suppress(OSError, PipeError):
            for _ in range(count):
                workers.append(await spawn_worker(system, *libraries))
        yield workers
    finally:
        await kill_and_close(workers)
