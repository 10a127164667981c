"""The launcher `ray`: ranks run on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Annotated, ClassVar

import structlog
from msgspec import Meta, structs

from eventlm.launchers.launcher import Launcher, StartedRank
from eventlm.launchers.ray.checkpoint import name_of
from eventlm.launchers.ray.driver_link import DriverLink
from eventlm.launchers.ray.memory_plan import PlacedReplica, setups_with_blocks
from eventlm.launchers.ray.messages import PARENT, HostFacts, PlaceReplica
from eventlm.launchers.ray.placement import BundleOf, Strategy, bundles_of, most_threads
from eventlm.launchers.ray.remote_process import RemoteProcess
from eventlm.launchers.spawned_worker import ENVIRONMENT, kill_and_close
from eventlm.system.remote_pipe import RemoteParentPipe, RunKeys
from eventlm.system.shared_folder import NO_STEP
from eventlm.system.system import System
from eventlm.worker.protocol import FAKE_MODEL, Peers, WorkerSetup

#: How long a replica that has run waits for room before it tells the engine. It goes on waiting.
RESTART_TIMEOUT_SECONDS = 2
#: The module that a rank's process runs.
WORKER = "eventlm.worker.process"
_ADDRESS = re.compile(r"[^/\s]+:\d{1,5}")

log = structlog.get_logger("eventlm.replica")


class RayRanks:
    """Processes on the nodes of a cluster. Their room is kept for those that follow them."""

    def __init__(self, ranks: Sequence[StartedRank], setups: Sequence[WorkerSetup]) -> None:
        self.ranks = ranks
        self.setups = setups

    def step_in_hand(self, rank: int) -> int:
        """As StartedRanks says."""
        return NO_STEP

    def release(self) -> None:
        """As StartedRanks says."""


class RayLauncher(Launcher, frozen=True, kw_only=True, dict=True):
    """Actors on the nodes of a Ray cluster, each with the worker process of a rank."""

    plans_memory: ClassVar[bool] = True

    #: Of the cluster, as in `ray.init`; auto: that of the node on which the engine runs.
    address: str = "auto"
    placement: Strategy = "pack"
    #: rank: those of a tensor group, which meet in each layer, may be on several hosts.
    bundle: BundleOf = "tensor_group"
    #: How long the first start of a replica waits for the cluster, and for room.
    timeout_s: Annotated[int, Meta(ge=1)] = 60

    def __post_init__(self) -> None:
        """Raises ValueError without Ray, and for an address that is none."""
        if find_spec("ray") is None:
            raise ValueError("it needs Ray, which is not installed; run: pip install 'eventlm[ray]'")

        if self.address != "auto" and _ADDRESS.fullmatch(self.address) is None:
            raise ValueError(f"address={self.address} is no address of a Ray cluster; give HOST:PORT, or auto")

    async def start(
        self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()
    ) -> RayRanks:
        """As Launcher.start."""
        return await self._session.start(self, system, setups)

    def share(self, others: Sequence[Launcher]) -> None:
        """As Launcher.share."""
        for other in others:
            if isinstance(other, RayLauncher) and other.address == self.address:
                self.__dict__["_session"] = other._session

    def give_up(self, replica: int) -> None:
        """As Launcher.give_up."""
        self._session.give_up(replica)

    async def close(self) -> None:
        """As Launcher.close."""
        await self._session.close()

    @cached_property
    def _session(self) -> RaySession:
        return RaySession(self.address)


class RaySession:
    """What all replicas of an engine on one cluster have in common: a driver of Ray, which is started again when it
    has died, and the memory of the cluster's hosts.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._link: DriverLink | None = None
        self._joining = asyncio.Lock()
        self._keys = RunKeys()
        #: Those that have begun to start: all of an engine, before the first of them has joined the cluster.
        self._replicas: set[int] = set()
        #: Those of them whose memory is to be planned, and those whose first ranks wait for that, by their replicasets'
        #: launchers.
        self._planned: set[int] = set()
        self._placed: list[tuple[RayLauncher, PlacedReplica]] = []
        self._all_placed = asyncio.Event()
        #: Of a rank of such bundles, where the configuration leaves them to be found.
        self._threads: dict[tuple[Strategy, int, int], int] = {}
        #: Where the ranks of replicas that have run were last.
        self._nodes: dict[int, list[str]] = {}

    async def start(self, launcher: RayLauncher, system: System, setups: Sequence[WorkerSetup]) -> RayRanks:
        """As Launcher.start."""
        replica = setups[0].replica
        self._replicas.add(replica)
        if setups[0].memory is not None:
            self._planned.add(replica)
        link = await self._joined(system, launcher.timeout_s)
        wanted = self._place(launcher, link, setups)
        hosts = await link.place(wanted)
        setups = await self._with_blocks(launcher, setups, hosts)
        nodes = [host.node for host in hosts]
        if nodes != self._nodes.get(replica):
            log.info("replica placed", replica=replica, hosts=[host.address for host in hosts])
        self._nodes[replica] = nodes
        threads = wanted.bundles[0].cpus // wanted.bundles[0].ranks
        ranks = await _start_ranks(link, self._keys, setups, hosts)
        return RayRanks(ranks, placed_setups(setups, hosts, threads))

    async def _with_blocks(
        self, launcher: RayLauncher, setups: Sequence[WorkerSetup], hosts: Sequence[HostFacts]
    ) -> Sequence[WorkerSetup]:
        """The setups for the memory of the hosts, once it is known which ranks share them. Raises LaunchError."""
        placed, replica = PlacedReplica(setups, hosts), setups[0].replica
        if replica not in self._planned:
            return setups
        if replica in self._nodes:
            # Where it was it had room. Elsewhere the others there have taken theirs already.
            if not {host.node for host in hosts} <= set(self._nodes[replica]):
                setups_with_blocks(setups, [placed])
            return setups
        self._placed.append((launcher, placed))
        if len(self._placed) == len(self._planned):
            self._all_placed.set()
        await self._all_placed.wait()
        own = [each for whose, each in self._placed if whose is launcher]
        return setups_with_blocks(setups, own, [each for whose, each in self._placed if whose is not launcher])

    def give_up(self, replica: int) -> None:
        """As Launcher.give_up."""
        if self._link is not None:
            self._link.leave(replica)

    async def close(self) -> None:
        """Leave the cluster, with all that was started there."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _joined(self, system: System, timeout_s: int) -> DriverLink:
        async with self._joining:
            if self._link is None or self._link.is_lost:
                await self.close()
                self._link = await DriverLink.open(system, self._address, timeout_s)
            return self._link

    def _place(self, launcher: RayLauncher, link: DriverLink, setups: Sequence[WorkerSetup]) -> PlaceReplica:
        first, layout = setups[0], setups[0].layout
        on_gpu = first.device != "cpu"
        ranks = layout.tensor if launcher.bundle == "tensor_group" else 1
        num_bundles = layout.num_ranks // ranks
        if first.model == FAKE_MODEL:
            threads = 1
        else:
            threads = first.threads or self._most_threads(link, launcher.placement, num_bundles, ranks)
        return PlaceReplica(
            replica=first.replica,
            bundles=bundles_of(num_bundles, ranks, threads, on_gpu=on_gpu),
            strategy=launcher.placement,
            # Of one that has run, the metrics are to say soon that it waits.
            timeout_s=RESTART_TIMEOUT_SECONDS if first.replica in self._nodes else launcher.timeout_s,
            model=name_of(first.model) if first.model != FAKE_MODEL else None,
            tokenizer=name_of(first.tokenizer) if first.tokenizer else None,
        )

    def _most_threads(self, link: DriverLink, strategy: Strategy, num_bundles: int, num_ranks: int) -> int:
        key = (strategy, num_bundles, num_ranks)
        if key not in self._threads:
            self._threads[key] = most_threads(link.nodes, strategy, len(self._replicas), num_bundles, num_ranks)
        return self._threads[key]


async def _start_ranks(
    link: DriverLink, keys: RunKeys, setups: Sequence[WorkerSetup], hosts: Sequence[HostFacts]
) -> list[StartedRank]:
    ranks: list[StartedRank] = []
    processes: list[RemoteProcess] = []
    try:
        for setup, host in zip(setups, hosts, strict=True):
            pipe = RemoteParentPipe(link.address, keys)
            process = link.run(
                setup.replica,
                setup.rank,
                WORKER,
                [*pipe.addresses, PARENT],
                environment=pipe.ends.environment(),
                defaults=ENVIRONMENT,
            )
            processes.append(process)
            ranks.append(StartedRank(pipe, process, host.address))
        for process in processes:
            await process.started()
    except BaseException:
        await kill_and_close(ranks)
        raise
    return ranks


def placed_setups(setups: Sequence[WorkerSetup], hosts: Sequence[HostFacts], threads: int) -> list[WorkerSetup]:
    """What the ranks of a replica are sent where they are: folders, threads and devices of those hosts, and how they
    meet. Of the GPUs of its host, Ray shows each of them its own.
    """
    meeting = f"{hosts[0].address}:{hosts[0].port}" if len({host.node for host in hosts}) > 1 else ""
    return [
        structs.replace(
            setup,
            model=host.model or setup.model,
            tokenizer=host.tokenizer,
            threads=threads,
            processors=[],
            device=setup.device if setup.device == "cpu" else "cuda:0",
            peers=Peers(
                shared_memory=host.shared,
                address=meeting,
                host=host.address if meeting else "",
                neighbours=_neighbours(host, hosts) if meeting else [],
            ),
        )
        for setup, host in zip(setups, hosts, strict=True)
    ]


def _neighbours(host: HostFacts, hosts: Sequence[HostFacts]) -> list[int]:
    """The ranks with which one shares memory."""
    return [rank for rank, other in enumerate(hosts) if other.node == host.node] if host.shared else []
