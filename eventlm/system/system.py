"""All that a program takes from its host, in one value."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.system.chance import Chance, SystemChance
from eventlm.system.clock import Clock, SystemClock
from eventlm.system.disk import SYSTEM_DISK, Disk
from eventlm.system.pipes import Pipes, SystemPipes
from eventlm.system.processes import Processes, SystemProcesses
from eventlm.system.shared_folder import SharedFolders, SystemSharedFolders
from eventlm.system.threads import SystemThreads, Threads


class System(NamedTuple):
    """A host."""

    clock: Clock
    chance: Chance
    disk: Disk
    threads: Threads
    processes: Processes
    pipes: Pipes
    shared_folders: SharedFolders


def real_system(*, is_kept: bool = False) -> System:
    """This host. is_kept: as of SystemProcesses."""
    return System(
        SystemClock(),
        SystemChance(),
        SYSTEM_DISK,
        SystemThreads(),
        SystemProcesses(is_kept=is_kept),
        SystemPipes(),
        SystemSharedFolders(),
    )
