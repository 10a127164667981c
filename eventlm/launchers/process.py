"""The launcher `process`: ranks are child processes on this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec import structs

from eventlm.launchers.launcher import Launcher, StartedRank
from eventlm.system.shared_folder import NO_STEP, Folder, SharedFolders
from eventlm.system.system import System
from eventlm.worker.protocol import Peers, WorkerSetup


class LocalRanks:
    """Child processes. Several of them share a folder, which is removed in the end."""

    def __init__(
        self,
        ranks: Sequence[StartedRank],
        setups: Sequence[WorkerSetup],
        shared_folders: SharedFolders,
        folder: Folder | None,
    ) -> None:
        self.ranks = ranks
        self._folder = folder
        self._board = shared_folders.board(folder.path, size=len(ranks)) if folder is not None else None
        peers = Peers(shared_memory=str(folder.path)) if folder is not None else Peers()
        self.setups = [structs.replace(setup, peers=peers) for setup in setups]

    def step_in_hand(self, rank: int) -> int:
        """As StartedRanks says."""
        return self._board.read(rank) if self._board is not None else NO_STEP

    def release(self) -> None:
        """As StartedRanks says."""
        if self._folder is not None:
            self._folder.remove()


class ProcessLauncher(Launcher, frozen=True, kw_only=True):
    """Child processes on this host."""

    is_local: ClassVar[bool] = True

    async def start(
        self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()
    ) -> LocalRanks:
        """As Launcher.start."""
        # A simulation has a launcher, too, and need not wait for asyncio.
        from eventlm.launchers.spawned_worker import kill_and_close, spawn_worker

        ranks = list(spawned[: len(setups)])
        num_spawned = len(ranks)
        folder = None
        try:
            folder = system.shared_folders.make() if len(setups) > 1 else None
            while len(ranks) < len(setups):
                ranks.append(await spawn_worker(system))
            return LocalRanks(ranks, setups, system.shared_folders, folder)
        except BaseException:
            await kill_and_close(ranks[num_spawned:])
            if folder is not None:
                folder.remove()
            raise
