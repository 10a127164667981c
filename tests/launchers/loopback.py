"""A launcher whose ranks are as on another host: over TCP, with another clock and no memory in common, though
they run here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from msgspec import structs

from eventlm.launchers.launcher import Launcher, StartedRank
from eventlm.launchers.process import LocalRanks
from eventlm.system.remote_pipe import RemoteParentPipe, RunKeys
from eventlm.system.system import System
from eventlm.worker.protocol import Peers, WorkerSetup

_SKEWED = """
import time
real = time.monotonic_ns
time.monotonic_ns = lambda: real() + {skew_ns}
from eventlm.worker.process import main
main()
"""


class LoopbackLauncher(Launcher, frozen=True, kw_only=True):
    """Starts ranks on a host whose clock is so far ahead."""

    skew_ns: int = 0

    async def start(
        self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()
    ) -> LocalRanks:
        """As Launcher.start."""
        keys, ranks = RunKeys(), []
        for _ in setups:
            pipe = RemoteParentPipe("127.0.0.1", keys)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _SKEWED.format(skew_ns=self.skew_ns), *pipe.addresses, str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | pipe.ends.environment(),
            )
            ranks.append(StartedRank(pipe, process, "elsewhere"))
        started = LocalRanks(ranks, setups, system.shared_folders, None)
        # Of a port that is free now.
        with socket.create_server(("127.0.0.1", 0)) as free:
            peers = Peers(address=f"127.0.0.1:{free.getsockname()[1]}", host="127.0.0.1")
        started.setups = [structs.replace(setup, peers=peers) for setup in started.setups]
        return started
