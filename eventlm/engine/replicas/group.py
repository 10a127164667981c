"""All replicas of an engine: starts and stops them together, and passes messages to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from eventlm.engine.replicas.controller import ReplicaController, ReplicaOwner
from eventlm.engine.replicas.left_workers import LeftWorkers
from eventlm.engine.setup import EngineSetup, with_blocks, worker_setups
from eventlm.events import Launched
from eventlm.launchers.launcher import StartedRank
from eventlm.system.left_process import LeftProcess
from eventlm.system.system import System
from eventlm.worker.protocol import PrepareGrammar, StartProgress, StepPayload, WorkerReady

#: Called with the number of a replica and what its worker does.
OnStartProgress = Callable[[int, StartProgress], None]

log = structlog.get_logger("eventlm.replica")


class Replicas:
    """The replicas of all replicasets by index. `num_live` counts those of each set that were not given up; on_dead
    gets the set and the reason for each other.
    """

    def __init__(
        self,
        system: System,
        setups: Sequence[EngineSetup],
        engine: ReplicaOwner,
        on_dead: Callable[[int, str], None],
    ) -> None:
        self._system = system
        self.num_live = [setup.core.num_replicas for setup in setups]
        self._setups = list(setups)
        launchers = [setup.launcher for setup in setups]
        for number, launcher in enumerate(launchers):
            launcher.share(launchers[:number])
        self._on_dead = on_dead
        self._sets = [
            self._controllers(
                system,
                setup,
                engine,
                partial(self._given_up, number),
                model=setup.core.models[0] if len(setups) > 1 else "",
            )
            for number, setup in enumerate(setups)
        ]
        self._all = {replica.index: replica for replicas in self._sets for replica in replicas}
        self._num_replicas = sum(self.num_live)

    @staticmethod
    def _controllers(
        system: System, setup: EngineSetup, engine: ReplicaOwner, on_dead: Callable[[str], None], *, model: str
    ) -> list[ReplicaController]:
        # Other servers have no worker here.
        workers, num_ranks = worker_setups(setup), setup.layout.num_ranks
        return [
            ReplicaController(
                system,
                workers[first : first + num_ranks],
                setup.config.worker,
                engine,
                on_dead,
                setup.launcher,
                model=model,
            )
            for first in range(0, len(workers), num_ranks)
        ]

    def _spawned_for(self, replica: ReplicaController, spawned: Sequence[StartedRank]) -> Sequence[StartedRank]:
        """Those of the processes that are there already that a replica takes."""
        for setup in reversed(self._setups):
            if replica.index >= setup.first_replica:
                num_ranks = setup.layout.num_ranks
                first = setup.first_worker + (replica.index - setup.first_replica) * num_ranks
                return spawned[first : first + num_ranks]
        raise AssertionError(f"there is no replica {replica.index}")

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, of several ranks that of the first; 0 for a replica without one."""
        return [pids[0] if pids else 0 for pids in self.rank_pids]

    @property
    def rank_pids(self) -> list[list[int]]:
        """Process ids of the ranks of each replica; none for one without a worker."""
        return [self._all[index].rank_pids if index in self._all else [] for index in range(self._num_replicas)]

    @property
    def left(self) -> list[LeftProcess]:
        """The workers that another engine could take over."""
        return [process for replica in self._all.values() if (process := replica.left) is not None]

    @property
    def has_worker(self) -> bool:
        """Whether any replica has a worker that takes steps."""
        return any(replica.is_up for replica in self._all.values())

    def set_has_worker(self, number: int) -> bool:
        """The same of a replicaset."""
        return any(replica.is_up for replica in self._sets[number])

    @property
    def num_waiting_for_room(self) -> int:
        """Replicas without a worker that wait until there is room for one."""
        return sum(replica.waits_for_room for replica in self._all.values())

    def go_on(self, setups: Sequence[EngineSetup], epochs: Sequence[int]) -> None:
        """The workers are to go on with a run. setups: within its limits. epochs: of each replica's first worker."""
        self._setups = list(setups)
        for setup, replicas in zip(setups, self._sets, strict=True):
            for replica in replicas:
                replica.go_on(setup.core, epochs[replica.index])

    async def start(
        self,
        *,
        must_measure: Sequence[bool],
        spawned: Sequence[StartedRank] = (),
        left: Sequence[LeftProcess] = (),
        on_progress: OnStartProgress | None = None,
    ) -> list[tuple[EngineSetup, WorkerReady]]:
        """Bring all first workers up; returns of each set the setup for their KV blocks and the first one's report.

        must_measure: of each set, whether a worker has to.

        left: workers of an engine that is gone; those that are of no use here are ended.

        The first of their processes may be `spawned` already. `on_progress` is called with what each of them does.
        Raises what keeps a worker from starting, and UsageError as `with_blocks` does.
        """
        # All of a set are alike, so only its first measures.
        measuring = {each[0].index for each, must in zip(self._sets, must_measure, strict=True) if each and must}
        left_workers = LeftWorkers(self._system, left)
        starts = (
            self._start_in_turns(group, measuring, spawned, left_workers, on_progress) for group in self._groups()
        )
        try:
            started = await asyncio.gather(*starts)
        finally:
            await left_workers.end()
        ready = dict(pair for group in started for pair in group)
        firsts = []
        for number, (setup, replicas) in enumerate(zip(self._setups, self._sets, strict=True)):
            if setup.forwards:
                firsts.append(WorkerReady(epoch=0, pid=0, host=setup.backends_host))
                continue
            self._setups[number] = _sized(setup, [ready[each.index].num_blocks for each in replicas])
            firsts.append(ready[replicas[0].index])
        return list(zip(self._setups, firsts, strict=True))

    def _groups(self) -> list[list[ReplicaController]]:
        """Replicas that must start one after the other: those with a GPU in common, because each measures the memory
        that it takes, and would count what another one takes at the same time.
        """
        groups: list[tuple[set[str], list[ReplicaController]]] = []
        for setup, replicas in zip(self._setups, self._sets, strict=True):
            for replica in replicas:
                gpus, together = _measured_gpus(setup, replica.index), [replica]
                for group in [each for each in groups if each[0] & gpus]:
                    groups.remove(group)
                    gpus, together = gpus | group[0], together + group[1]
                groups.append((gpus, sorted(together, key=lambda each: each.index)))
        return sorted((together for _, together in groups), key=lambda each: each[0].index)

    async def _start_in_turns(
        self,
        replicas: list[ReplicaController],
        measuring: set[int],
        spawned: Sequence[StartedRank],
        left: LeftWorkers,
        on_progress: OnStartProgress | None,
    ) -> list[tuple[int, WorkerReady]]:
        """Start them one after the other, with their indices; none after one that cannot start."""
        return [
            (
                replica.index,
                await replica.start(
                    warm_up=replica.index in measuring,
                    spawned=self._spawned_for(replica, spawned),
                    left=left,
                    on_progress=partial(on_progress, replica.index) if on_progress is not None else None,
                ),
            )
            for replica in replicas
        ]

    def run(self) -> None:
        """The run has begun: listen to the workers."""
        for setup, replicas in zip(self._setups, self._sets, strict=True):
            for replica in replicas:
                replica.run(setup.core)

    async def stop(self) -> None:
        """End the workers."""
        try:
            await asyncio.gather(*(replica.stop() for replica in self._all.values()))
        finally:
            await asyncio.gather(*(setup.launcher.close() for setup in self._setups))

    def ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        """Send a launch to its worker."""
        self._all[launched.replica].ship(launched, body, payload)

    def request_condemned(self, request: int) -> None:
        """A request has ended because it killed its workers. Their restarts do not count against the budgets."""
        log.error("a request has ended because it killed every worker that computed it", request=request)
        for replica in self._all.values():
            replica.forgive()

    def prepare_grammar(self, replica: int, message: PrepareGrammar) -> None:
        """Have a replica's worker build a grammar."""
        self._all[replica].prepare_grammar(message)

    def _given_up(self, number: int, reason: str) -> None:
        self.num_live[number] -= 1
        self._on_dead(number, reason)


def _measured_gpus(setup: EngineSetup, replica: int) -> set[str]:
    """The GPUs of this host whose memory the ranks of a replica measure."""
    if setup.core.num_blocks or not setup.launcher.is_local:
        return set()
    num_ranks, devices = setup.layout.num_ranks, setup.devices
    first = setup.first_worker + (replica - setup.first_replica) * num_ranks
    return {devices[number % len(devices)].name for number in range(first, first + num_ranks)} if devices else set()


def _sized(planned: EngineSetup, num_blocks: Sequence[int]) -> EngineSetup:
    """The setup of a set for the KV blocks that fit into its workers, with a warning if they cut the context."""
    setup = with_blocks(planned, num_blocks)
    core, longest = setup.core, planned.core.max_model_len
    if core.max_model_len < longest:
        flag = "--gpu-memory-utilization" if setup.devices else "--kv-memory"
        log.warning(
            f"the context is cut from {longest} to {core.max_model_len} tokens, which {core.num_blocks} KV blocks "
            f"hold; raise {flag} for more"
        )
    return setup
