"""The driver of Ray: a process of its own beside the engine, which owns the actors of all ranks.

    python -m eventlm.launchers.ray.driver FD

FD is its end of a socket pair, whose messages are those of `messages.py`. Ray runs dozens of threads in its driver and
ends it when the node's raylet dies; neither shall be the engine's. When the engine dies the socket is closed, this
process leaves, and Ray ends the actors that it owns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from msgspec import structs
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from eventlm._version import __version__
from eventlm.launchers.ray.actor import MAX_CALLS, RankActor, facts_here
from eventlm.launchers.ray.messages import (
    Connect,
    Connected,
    FromDriver,
    GiveUpRoom,
    HostFacts,
    KillRank,
    LookUp,
    News,
    Placed,
    PlaceReplica,
    RankEnded,
    Refused,
    Said,
    Started,
    StartRank,
    decode_to_driver,
    encode,
)
from eventlm.launchers.ray.placement import NodeRoom, no_room
from eventlm.system.frames import FrameConnection

#: How long the actors of a replica that has room may take to start and to look the checkpoint up.
START_SECONDS = 120.0
#: The same for actors that have run before.
ANSWER_SECONDS = 10.0
#: The pause before an actor that cannot be reached is asked again.
UNAVAILABLE_SECONDS = 0.2
#: The exit code of a process of which only its actor's end is known.
UNKNOWN_EXIT = 1
#: In what Ray says of an actor's end.
_CAUSE = re.compile(r"because (its .+? has died)\b")


class RefusedError(Exception):
    """A replica cannot run where it has room."""


class NoRoomError(Exception):
    """A replica waits for room."""


class LostActorError(Exception):
    """An actor has died, or does not answer."""


class _Group:
    """The room of a replica, and the actors in it by rank."""

    def __init__(self, room: PlacementGroup, wanted: PlaceReplica) -> None:
        self.room = room
        self.wanted = wanted
        self.actors: list[Any] = []

    def is_whole(self) -> bool:
        """Whether no bundle of it has been lost."""
        return bool(placement_group_table(self.room)["state"] == "CREATED")

    def nodes(self) -> list[dict[str, Any]]:
        """Ray's record of the node that each rank is on. Raises LostActorError if one has gone."""
        by_id = {node["NodeID"]: node for node in ray.nodes()}
        bundles = placement_group_table(self.room)["bundles_to_node_id"]
        try:
            return [
                by_id[bundles[number]] for number, bundle in enumerate(self.wanted.bundles) for _ in range(bundle.ranks)
            ]
        except KeyError:
            raise LostActorError(f"the room of replica {self.wanted.replica} was lost again") from None


class Driver:
    """Does what the engine asks for."""

    def __init__(self) -> None:
        self._connection: FrameConnection | None = None
        self._lost = asyncio.Event()
        self._groups: dict[int, _Group] = {}
        self._placing: dict[int, asyncio.Task[None]] = {}
        #: Those that ask Ray for room, which cannot be interrupted.
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, end: socket.socket) -> None:
        """Serve until the engine closes the connection."""
        self._connection = await FrameConnection.open(end, self._take, self._lost.set)
        await self._lost.wait()

    def _send(self, message: FromDriver) -> None:
        assert self._connection is not None
        self._connection.send(encode(message))

    def _take(self, frame: bytes) -> None:
        message = decode_to_driver(frame)
        match message:
            case Connect():
                self._begin(self._connect(message))
            case PlaceReplica():
                self._placing[message.replica] = self._begin(self._place(message))
            case StartRank():
                self._begin(self._run_rank(message))
            case KillRank():
                self._begin(self._kill(message))
            case GiveUpRoom():
                self._begin(self._leave(message.replica))

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self, message: Connect) -> None:
        def connect() -> Connected:
            found = ray.init(address=message.address, log_to_driver=False, logging_level="error")
            _print_to_logs_of(found.address_info["session_dir"])
            return Connected(address=ray.util.get_node_ip_address(), nodes=nodes_of_cluster())

        try:
            self._send(await asyncio.to_thread(connect))
        except ConnectionError:
            self._send(Refused(message="there is none", no_room=True))
        except Exception as error:
            self._send(Refused(message=in_one_line(error)))

    async def _place(self, wanted: PlaceReplica) -> None:
        replica = wanted.replica
        try:
            self._send(Placed(replica=replica, hosts=await self._kept(wanted) or await self._placed(wanted)))
        except NoRoomError as error:
            self._send(Refused(replica=replica, message=str(error), no_room=True))
        except RefusedError as error:
            await self._drop(replica)
            self._send(Refused(replica=replica, message=str(error)))
        except (LostActorError, ray.exceptions.RayError) as error:
            await self._drop(replica)
            self._send(Refused(replica=replica, message=in_one_line(error), no_room=True))

    async def _kept(self, wanted: PlaceReplica) -> list[HostFacts]:
        """Where a replica's ranks are that still has all of its room and actors; empty if it has lost some."""
        group = self._groups.get(wanted.replica)
        if group is None:
            return []
        if structs.replace(group.wanted, timeout_s=wanted.timeout_s) == wanted:
            if not group.actors:
                # It waits for room since the last time.
                return []
            with contextlib.suppress(LostActorError, ray.exceptions.RayError):
                if await asyncio.to_thread(group.is_whole):
                    return await self._describe(group, ANSWER_SECONDS)
        await self._drop(wanted.replica)
        return []

    async def _placed(self, wanted: PlaceReplica) -> list[HostFacts]:
        group = await self._find_room(wanted)
        self._put_actors(group)
        return await self._describe(group, START_SECONDS)

    async def _find_room(self, wanted: PlaceReplica) -> _Group:
        group = self._groups.get(wanted.replica)
        if group is None:
            asking = self._asking[wanted.replica] = self._begin(self._ask_for_room(wanted))
            # The thread goes on when this is cancelled, and what it gets is to be given back.
            await asyncio.shield(asking)
            group = self._groups[wanted.replica]
        if not await asyncio.to_thread(group.room.wait, wanted.timeout_s):
            nodes = await asyncio.to_thread(nodes_of_cluster)
            held = [bundle for each in self._groups.values() if each.actors for bundle in each.wanted.bundles]
            message = no_room(wanted.replica, wanted.bundles, wanted.strategy, nodes, held)
            raise NoRoomError(f"{message}; waited {wanted.timeout_s} s")
        return group

    async def _ask_for_room(self, wanted: PlaceReplica) -> None:
        bundles = [bundle.resources for bundle in wanted.bundles]
        room = await asyncio.to_thread(placement_group, bundles, strategy=wanted.strategy.upper())
        self._groups[wanted.replica] = _Group(room, wanted)

    def _put_actors(self, group: _Group) -> None:
        actor_class = ray.remote(RankActor)
        for number, bundle in enumerate(group.wanted.bundles):
            options = {
                "num_cpus": bundle.cpus // bundle.ranks,
                "num_gpus": bundle.gpus // bundle.ranks,
                "max_restarts": 0,
                "max_concurrency": MAX_CALLS,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group.room, placement_group_bundle_index=number
                ),
            }
            group.actors += [actor_class.options(**options).remote() for _ in range(bundle.ranks)]

    async def _describe(self, group: _Group, timeout_s: float) -> list[HostFacts]:
        """Where the ranks are. Raises RefusedError for one that cannot run there, LostActorError for an actor's end."""
        wanted = group.wanted
        look_up = LookUp(model=wanted.model, tokenizer=wanted.tokenizer)
        here = await asyncio.to_thread(facts_here, look_up)
        nodes = await asyncio.to_thread(group.nodes)
        makers = folder_makers([node["NodeID"] for node in nodes])
        maker = structs.replace(look_up, num_sharing=len(nodes))
        asked = [
            self._facts_of(rank, actor, encode(maker if rank in makers.values() else look_up), node)
            for rank, (actor, node) in enumerate(zip(group.actors, nodes, strict=True))
        ]
        try:
            hosts = await asyncio.wait_for(asyncio.gather(*asked), timeout_s)
        except TimeoutError:
            raise LostActorError(f"the actors of replica {wanted.replica} did not answer in {timeout_s:g} s") from None
        for host in hosts:
            if problem := mismatch(here, host):
                raise RefusedError(problem)
        shared = {node: hosts[rank].shared for node, rank in makers.items()}
        return [structs.replace(host, shared=shared.get(host.node, "")) for host in hosts]

    async def _facts_of(self, rank: int, actor: Any, look_up: bytes, node: dict[str, Any]) -> HostFacts:
        host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        try:
            facts = msgspec.msgpack.decode(await actor.describe.remote(look_up), type=HostFacts)
        except ray.exceptions.RayActorError as error:
            if "failed to import" in str(error):
                raise RefusedError(
                    f"{host} ({address}): the Python of Ray there cannot import eventlm {__version__}: "
                    f"{str(error).strip().splitlines()[-1]}"
                ) from error
            raise LostActorError(f"{host} ({address}): the actor of rank {rank} died: {in_one_line(error)}") from error
        return structs.replace(facts, host=host, address=address, node=node["NodeID"])

    async def _run_rank(self, command: StartRank) -> None:
        replica, rank, run = command.replica, command.rank, command.run
        exit_code: int | None = None
        reason = ""
        try:
            actor = self._groups[replica].actors[rank]
            self._send(Started(replica=replica, rank=rank, run=run, pid=await actor.start.remote(encode(command))))
            is_over = False
            while not is_over:
                try:
                    news = msgspec.msgpack.decode(await actor.watch.remote(), type=News)
                except ray.exceptions.ActorUnavailableError:
                    # It may be the network, and its messages to the engine go another way; Ray finds out.
                    await asyncio.sleep(UNAVAILABLE_SECONDS)
                    continue
                if news.output:
                    self._send(Said(replica=replica, rank=rank, run=run, output=news.output))
                if news.exit_code is not None and exit_code is None:
                    exit_code = news.exit_code
                    self._send(RankEnded(replica=replica, rank=rank, run=run, exit_code=exit_code))
                is_over = news.is_over
        except (KeyError, IndexError):
            reason = "its replica has no room"
        except ray.exceptions.RayError as error:
            reason = in_one_line(error)
        if exit_code is None:
            self._send(RankEnded(replica=replica, rank=rank, run=run, exit_code=UNKNOWN_EXIT, reason=reason))
        self._send(Said(replica=replica, rank=rank, run=run, output=b""))

    async def _kill(self, message: KillRank) -> None:
        group = self._groups.get(message.replica)
        if group is not None and message.rank < len(group.actors):
            group.actors[message.rank].kill.remote(message.run)

    async def _leave(self, replica: int) -> None:
        if (placing := self._placing.pop(replica, None)) is not None:
            placing.cancel()
        if (asking := self._asking.pop(replica, None)) is not None:
            await asyncio.wait({asking})
        await self._drop(replica)

    async def _drop(self, replica: int) -> None:
        """Give up the room of a replica; Ray ends its actors at once."""
        if (group := self._groups.pop(replica, None)) is not None:
            await asyncio.to_thread(remove_placement_group, group.room)


def _print_to_logs_of(session: str) -> None:
    """Send stdout to a file beside the logs of a session of Ray, which prints dozens of lines about each lost node. The
    engine logs what that means for its ranks.
    """
    output = Path(session, "logs", f"eventlm-driver-{os.getpid()}.out")
    sys.stdout = output.open("w", buffering=1)


def nodes_of_cluster() -> list[NodeRoom]:
    """The nodes that are alive."""
    free = available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                NodeRoom(
                    host=node["NodeManagerHostname"],
                    address=node["NodeManagerAddress"],
                    cpus=total.get("CPU", 0),
                    free_cpus=left.get("CPU", 0),
                    gpus=total.get("GPU", 0),
                    free_gpus=left.get("GPU", 0),
                )
            )
    return found


def folder_makers(nodes: Sequence[str]) -> dict[str, int]:
    """The first rank of each node that has several, which makes their folder. nodes: of each rank."""
    return {node: nodes.index(node) for node in nodes if nodes.count(node) > 1}


def mismatch(here: HostFacts, there: HostFacts) -> str:
    """Why a host cannot run a rank of an engine whose own host has found `here`; empty if it can."""
    host = f"{there.host} ({there.address})"
    if there.version != here.version:
        return f"{host} has eventlm {there.version}, and the engine is {here.version}; install the same on both"
    if there.problem:
        return f"{host} cannot use the model: {there.problem}"
    if there.fingerprint != here.fingerprint:
        return (
            f"{host} has another checkpoint in {there.model}: its fingerprint is {there.fingerprint}, and that of "
            f"{here.model} on the engine's host is {here.fingerprint}; copy the same files to both"
        )
    return ""


def in_one_line(error: BaseException) -> str:
    """What an error of Ray's says, without its advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    if (cause := _CAUSE.search(text)) is not None:
        return cause[1]
    return text


def main() -> None:
    """Entry point of the process."""
    end = socket.socket(fileno=int(sys.argv[1]))
    asyncio.run(Driver().run(end))
    # At once: what Ray still has to tidy up, it does when this process has gone.
    os._exit(0)


if __name__ == "__main__":
    main()
