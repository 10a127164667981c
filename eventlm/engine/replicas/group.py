"""All replicas of an engine: starts and stops them together, and passes messages to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from eventlm.engine.replicas.controller import ReplicaController, ReplicaOwner
from eventlm.engine.setup import EngineSetup, with_blocks, worker_setups
from eventlm.events import Launched
from eventlm.launchers.launcher import StartedRank
from eventlm.system.system import System
from eventlm.worker.protocol import PrepareGrammar, StartProgress, StepPayload, WorkerReady

#: Called with the number of a replica and what its worker does.
OnStartProgress = Callable[[int, StartProgress], None]

log = structlog.get_logger("eventlm.replica")


class Replicas:
    """The replicas by index. `num_live` counts those that were not given up; on_dead gets the reason for each other."""

    def __init__(
        self, system: System, setup: EngineSetup, engine: ReplicaOwner, on_dead: Callable[[str], None]
    ) -> None:
        self.num_live = setup.core.num_replicas
        self._setup = setup
        self._on_dead = on_dead
        self._num_ranks = setup.layout.num_ranks
        workers = worker_setups(setup)
        self._all = [
            ReplicaController(
                system,
                workers[first : first + self._num_ranks],
                setup.config.worker,
                engine,
                self._given_up,
                setup.launcher,
            )
            for first in range(0, len(workers), self._num_ranks)
        ]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, of several ranks that of the first; 0 for a replica without one."""
        return [pids[0] if pids else 0 for pids in self.rank_pids]

    @property
    def rank_pids(self) -> list[list[int]]:
        """Process ids of the ranks of each replica; none for one without a worker."""
        return [replica.rank_pids for replica in self._all]

    @property
    def has_worker(self) -> bool:
        """Whether any replica has a worker that takes steps."""
        return any(replica.is_up for replica in self._all)

    @property
    def num_waiting_for_room(self) -> int:
        """Replicas without a worker that wait until there is room for one."""
        return sum(replica.waits_for_room for replica in self._all)

    async def start(
        self,
        *,
        must_measure: bool,
        spawned: Sequence[StartedRank] = (),
        on_progress: OnStartProgress | None = None,
    ) -> tuple[EngineSetup, WorkerReady]:
        """Bring all first workers up; returns the setup for their KV blocks and the first one's report.

        The first of their processes may be `spawned` already. `on_progress` is called with what each of them does.
        Raises what keeps a worker from starting, and UsageError as `with_blocks` does.
        """
        starts = (self._start_in_turns(group, must_measure, spawned, on_progress) for group in self._groups())
        started = await asyncio.gather(*starts)
        ready = dict(pair for group in started for pair in group)
        num_blocks = [worker.num_blocks for worker in ready.values()]
        planned, self._setup = self._setup, with_blocks(self._setup, num_blocks)
        core, longest = self._setup.core, planned.core.max_model_len
        if core.max_model_len < longest:
            log.warning(
                f"the context is cut from {longest} to {core.max_model_len} tokens, which {core.num_blocks} KV blocks "
                "hold; raise --gpu-memory-utilization for more"
            )
        return self._setup, ready[0]

    def _groups(self) -> list[list[ReplicaController]]:
        """Replicas that must start one after the other: those on one GPU, because each measures the memory that it
        takes, and would count what another one takes at the same time.
        """
        num_devices = len(self._setup.devices) if not self._setup.core.num_blocks else 0
        return [self._all[first::num_devices] for first in range(num_devices)] or [[each] for each in self._all]

    async def _start_in_turns(
        self,
        replicas: list[ReplicaController],
        must_measure: bool,
        spawned: Sequence[StartedRank],
        on_progress: OnStartProgress | None,
    ) -> list[tuple[int, WorkerReady]]:
        """Start them one after the other, with their indices; none after one that cannot start."""
        return [
            (
                replica.index,
                await replica.start(
                    # All are alike, so only the first measures.
                    warm_up=must_measure and replica.index == 0,
                    spawned=spawned[replica.index * self._num_ranks :][: self._num_ranks],
                    on_progress=partial(on_progress, replica.index) if on_progress is not None else None,
                ),
            )
            for replica in replicas
        ]

    def run(self) -> None:
        """The run has begun: listen to the workers."""
        for replica in self._all:
            replica.run(self._setup.core)

    async def stop(self) -> None:
        """End the workers."""
        try:
            await asyncio.gather(*(replica.stop() for replica in self._all))
        finally:
            await self._setup.launcher.close()

    def ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        """Send a launch to its worker."""
        self._all[launched.replica].ship(launched, body, payload)

    def request_condemned(self, request: int) -> None:
        """A request has ended because it killed its workers. Their restarts do not count against the budgets."""
        log.error("a request has ended because it killed every worker that computed it", request=request)
        for replica in self._all:
            replica.forgive()

    def prepare_grammar(self, replica: int, message: PrepareGrammar) -> None:
        """Have a replica's worker build a grammar."""
        self._all[replica].prepare_grammar(message)

    def _given_up(self, reason: str) -> None:
        self.num_live -= 1
        self._on_dead(reason)
