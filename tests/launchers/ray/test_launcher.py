"""Engines whose ranks are on the nodes of a Ray cluster: one of all tests, a head without processors and two nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec import structs

from eventlm.core.shards import Layout
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import worker_setups
from eventlm.errors import UsageError
from eventlm.events import WorkerLost, WorkerUp
from eventlm.launchers.launcher import LaunchError, StartedRank
from eventlm.launchers.ray.driver_link import DriverLink
from eventlm.launchers.ray.launcher import RayLauncher, placed_setups
from eventlm.launchers.ray.messages import HostFacts, PlaceReplica
from eventlm.launchers.ray.placement import Bundle, NodeRoom
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import fake_token
from eventlm.worker.protocol import Peers, WorkerSetup
from tests.checkpoints import make_checkpoint
from tests.engine.engines import fake_setup
from tests.launchers.ray.cluster import Cluster, processes_of, running_cluster, worker_pids
from tests.launchers.ray.test_memory_plan import MEMORY
from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.serving import Server, serve, verified

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Nodes may be, for the next test."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests, which leave it with two nodes."""
    with running_cluster() as found:
        yield found


def setups_of(layout: Layout, **changes: object) -> list[WorkerSetup]:
    """Of the ranks of one replica of a model that is not the fake one."""
    [setup] = worker_setups(fake_setup())
    given = {"threads": 1, **changes}
    return [structs.replace(setup, layout=layout, rank=rank, **given) for rank in range(layout.num_ranks)]


def answers(server: Server) -> bool:
    """Whether a request is answered with what the fake model says."""
    reply = server.complete(seed=5, max_tokens=6, return_token_ids=True)
    return reply.status == 200 and reply.json()["choices"][0]["token_ids"] == [fake_token(5, 0, n) for n in range(6)]


def greedy(server: Server, prompt: str) -> list[int]:
    """The token ids of a reply without chance."""
    reply = server.complete(prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def test_an_engine_outlives_its_ranks_and_nodes_and_nothing_outlives_it(cluster: Cluster, tmp_path: Path) -> None:
    """Two replicas of two tensor ranks, each of which fills a node."""
    flags = ("--model", "fake", "--replicas", "2", "--tensor-parallel-size", "2", "--router", "round_robin")
    server = Server(tmp_path, *flags, "--launcher", f"ray:address={cluster.address}", "--log-format", "json")
    try:
        server.wait_ready()
        first, second = cluster.nodes
        assert [len(worker_pids(node)) for node in cluster.nodes] == [2, 2]
        assert all(answers(server) for _ in range(4))

        # A rank is killed: the group starts again where it was, in the same actors.
        actors = {process.pid for process in processes_of(first)} - set(worker_pids(first))
        killed = worker_pids(first)[1]
        peer = worker_pids(first)[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not is_running(peer))
        wait_until(lambda: server.figure("eventlm:replica_up") == 2 and len(worker_pids(first)) == 2)
        assert actors <= {process.pid for process in processes_of(first)}
        assert all(answers(server) for _ in range(4))

        # A node is lost: the other one serves, and the replica waits for as long as it takes.
        second.kill()
        wait_until(lambda: server.figure("eventlm:replica_up") == 1)
        wait_until(lambda: b"eventlm:replicas_waiting_for_room 1.0" in server.request("GET", "/metrics").data)
        health = server.request("GET", "/health")
        assert (health.status, health.json()) == (200, {"status": "ready", "waiting_for_room": 1})
        assert all(answers(server) for _ in range(4))

        # A node joins: the replica is back.
        cluster.nodes.remove(second)
        third = cluster.add()
        wait_until(lambda: server.figure("eventlm:replica_up") == 2)
        wait_until(lambda: server.request("GET", "/health").json() == {"status": "ready"})
        assert len(worker_pids(third)) == 2
        assert all(answers(server) for _ in range(4))

        # The engine is killed: nothing is left on any node.
        left = [process.pid for node in cluster.nodes for process in processes_of(node)]
        assert len(left) == 8
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not any(map(is_running, left)), seconds=30)
    finally:
        server.close()
    # Nothing of Ray's is among the lines.
    says = [json.loads(line) for line in server.stderr.splitlines()]
    placed = [line["hosts"] for line in says if line["event"] == "replica placed"]
    assert sorted(placed[:2]) == [[first.address] * 2, [second.address] * 2]
    assert placed[2:] == [[third.address] * 2]
    waits = [line["error"] for line in says if line["event"] == "worker did not start"]
    assert len(waits) == 1
    assert waits[0].startswith("Ray has no room for replica ")
    assert ": it needs 2 CPUs on one host for its 2 ranks (placement=pack); free: " in waits[0]
    assert waits[0].endswith("; other replicas of this engine hold 2 CPUs; waited 2 s")
    trace = verified(server.trace)
    lost = trace.of(WorkerLost)
    assert lost[0].reason == f"on {first.address}: died (killed by SIGKILL)"
    assert lost[1].reason == f"on {second.address}: was lost (its node has died)"
    assert len(trace.of(WorkerUp)) >= 4


@pytest.mark.soak
def test_ranks_on_two_nodes_say_what_one_worker_says(cluster: Cluster, tmp_path: Path) -> None:
    """They meet over torch.distributed, stages and tensor ranks alike."""
    flags = ("--model", str(make_checkpoint(tmp_path / "model")), "--dtype", "float32", "--threads", "1")
    prompts = [f"every step of request {number}" for number in range(4)]
    with serve(tmp_path, *flags) as server:
        expected = [greedy(server, prompt) for prompt in prompts]
    two_stages = ("--pipeline-parallel-size", "2", "--max-decodes-in-flight-per-seq", "1")
    where = f"ray:address={cluster.address},placement=strict_spread,bundle=rank"
    for layout in (two_stages, ("--tensor-parallel-size", "2")):
        with serve(tmp_path, *flags, *layout, "--launcher", where) as server:
            assert [len(worker_pids(node)) for node in cluster.nodes] == [1, 1]
            assert [greedy(server, prompt) for prompt in prompts] == expected


async def test_what_finds_no_room_is_refused_in_time_until_room_is_given_back(cluster: Cluster) -> None:
    patience = round(PATIENCE_SECONDS)
    bundles = [Bundle(ranks=2, cpus=2), Bundle(ranks=1, cpus=2)]
    first = PlaceReplica(replica=0, bundles=bundles, strategy="pack", timeout_s=patience)
    second = PlaceReplica(replica=1, bundles=bundles[1:], strategy="pack", timeout_s=1)
    link = await DriverLink.open(real_system(), cluster.address, PATIENCE_SECONDS)
    try:
        hosts = await link.place(first)
        # Those of one node share a folder.
        assert hosts[0].shared
        assert [host.shared for host in hosts] == [hosts[0].shared] * 2 + [""]
        begun = time.monotonic()
        with pytest.raises(LaunchError) as caught:
            await link.place(second)
        assert time.monotonic() - begun < 30
        link.leave(0)
        assert len(await link.place(structs.replace(second, timeout_s=patience))) == 1
    finally:
        await link.close()
    assert caught.value.waits_for_room
    message = str(caught.value)
    assert message.startswith("Ray has no room for replica 1: it needs 2 CPUs for its rank (placement=pack); free: ")
    for node in cluster.nodes:
        assert re.search(rf"\({re.escape(node.address)}\) 0 of 2 CPUs", message)
    assert message.endswith("; other replicas of this engine hold 4 CPUs; waited 1 s")


async def test_a_host_without_the_checkpoint_is_named(cluster: Cluster, tmp_path: Path) -> None:
    launcher = RayLauncher(address=cluster.address, timeout_s=100)
    try:
        with pytest.raises(
            LaunchError, match=r"^\S+ \(127\.0\.0\.1\d\) cannot use the model: there is no \S+/gone; copy"
        ):
            await launcher.start(real_system(), setups_of(Layout(), model=str(tmp_path / "gone")))
    finally:
        await launcher.close()


async def test_without_a_cluster_there_is_one_line() -> None:
    launcher = RayLauncher(address="127.0.0.1:9", timeout_s=2)
    try:
        with pytest.raises(LaunchError, match=r"^cannot join the Ray cluster at 127\.0\.0\.1:9: .*ray start"):
            await launcher.start(real_system(), setups_of(Layout()))
    finally:
        await launcher.close()


class PlacedLink:
    """Stands in for the driver: puts each replica on the node that the test names."""

    address, is_lost = "10.0.0.1", False
    nodes: ClassVar[list[NodeRoom]] = []

    def __init__(self, hosts: Sequence[HostFacts]) -> None:
        self.hosts = list(hosts)

    async def place(self, wanted: PlaceReplica) -> list[HostFacts]:
        return [self.hosts[wanted.replica]]

    async def close(self) -> None:
        pass


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> PlacedLink:
    """The only one that is opened. Two replicas are on one node with 6,000 bytes."""
    found = PlacedLink([HostFacts(address="10.0.0.2", node="a", free_bytes=6000)] * 2)
    opened = [found]

    async def open_link(*_: object) -> PlacedLink:
        # All replicas of an engine have begun before a driver has started.
        await asyncio.sleep(0)
        return opened.pop()

    async def start_ranks(*_: object) -> list[StartedRank]:
        return []

    monkeypatch.setattr(DriverLink, "open", open_link)
    monkeypatch.setattr("eventlm.launchers.ray.launcher._start_ranks", start_ranks)
    return found


async def started(launcher: RayLauncher, replica: int, folder: Path, **changes: object) -> Sequence[WorkerSetup]:
    """The setups of a replica's only rank, which takes 1,500 bytes and its cache."""
    given = {"replica": replica, "num_blocks": 0, "memory": MEMORY, **changes}
    return (await launcher.start(real_system(), setups_of(Layout(), model=str(folder), **given))).setups


async def test_replicasets_plan_the_memory_of_a_cluster_together(link: PlacedLink, tmp_path: Path) -> None:
    first, second = RayLauncher(), RayLauncher()
    second.share([RayLauncher(address="10.0.0.1:6379"), first])
    both = await asyncio.gather(started(first, 0, tmp_path), started(second, 1, tmp_path))
    # A quarter of what half of 6,000 bytes leaves, in blocks of 10.
    assert [setup.num_blocks for [setup] in both] == [37, 37]
    await asyncio.gather(first.close(), second.close())


async def test_a_replica_without_a_plan_waits_for_none(link: PlacedLink, tmp_path: Path) -> None:
    first, second = RayLauncher(), RayLauncher()
    second.share([first])
    starts = started(first, 0, tmp_path), started(second, 1, tmp_path, memory=None, num_blocks=5)
    both = await asyncio.wait_for(asyncio.gather(*starts), PATIENCE_SECONDS)
    assert [setup.num_blocks for [setup] in both] == [112, 5]


async def test_a_replica_that_comes_back_on_too_small_a_host_is_refused(link: PlacedLink, tmp_path: Path) -> None:
    launcher = RayLauncher()
    [setup] = await started(launcher, 0, tmp_path)
    # What is free where it was may count what has just ended.
    link.hosts[0] = structs.replace(link.hosts[0], free_bytes=0)
    assert await started(launcher, 0, tmp_path, num_blocks=setup.num_blocks) == [setup]
    link.hosts[0] = structs.replace(link.hosts[0], node="b", free_bytes=1400)
    with pytest.raises(LaunchError, match="too little memory"):
        await started(launcher, 0, tmp_path, num_blocks=setup.num_blocks)
    link.hosts[0] = structs.replace(link.hosts[0], node="c", free_bytes=2000)
    assert await started(launcher, 0, tmp_path, num_blocks=setup.num_blocks) == [setup]


def test_without_ray_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.launchers.ray.launcher.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        resolve_launcher({"type": "ray"})
    assert str(caught.value) == "launcher ray: it needs Ray, which is not installed; run: pip install 'eventlm[ray]'"


def test_a_wrong_parameter_is_explained() -> None:
    with pytest.raises(UsageError, match="placement"):
        resolve_launcher({"type": "ray", "placement": "heap"})
    with pytest.raises(UsageError, match="timeout_s"):
        resolve_launcher({"type": "ray", "timeout_s": 0})
    for address in ("nonsense", "ray://10.0.0.1:10001", "10.0.0.1:", ""):
        with pytest.raises(UsageError, match=r"is no address of a Ray cluster; give HOST:PORT, or auto$"):
            resolve_launcher({"type": "ray", "address": address})
    for address in ("auto", "10.0.0.1:6379", "[::1]:6379"):
        assert isinstance(resolve_launcher({"type": "ray", "address": address}), RayLauncher)


def test_ranks_get_what_their_hosts_have() -> None:
    hosts = [
        HostFacts(host="a", address="10.0.0.1", node="a", port=4000, model="/a/model", tokenizer="/a/tokenizer"),
        HostFacts(host="b", address="10.0.0.2", node="b", port=5000, model="/b/model", tokenizer="/b/tokenizer"),
    ]
    setups = setups_of(Layout(stages=2), model="/engine/model", tokenizer="/engine/tokenizer", processors=[3])
    first, second = placed_setups(setups, hosts, threads=7)
    assert (first.model, first.tokenizer, first.threads, first.processors) == ("/a/model", "/a/tokenizer", 7, [])
    assert (second.model, second.tokenizer, second.rank) == ("/b/model", "/b/tokenizer", 1)
    assert first.peers == Peers(address="10.0.0.1:4000", host="10.0.0.1")
    assert second.peers == Peers(address="10.0.0.1:4000", host="10.0.0.2")
    sharing = [structs.replace(hosts[0], shared="/dev/shm/x")] * 2
    assert [setup.peers for setup in placed_setups(setups, sharing, threads=1)] == [
        Peers(shared_memory="/dev/shm/x")
    ] * 2
    # Two on one host, one alone on another.
    of_three = [setup.peers for setup in placed_setups(setups_of(Layout(stages=3)), [*sharing, hosts[1]], threads=1)]
    first_two = Peers(shared_memory="/dev/shm/x", address="10.0.0.1:4000", host="10.0.0.1", neighbours=[0, 1])
    assert of_three == [first_two, first_two, Peers(address="10.0.0.1:4000", host="10.0.0.2")]
    [alone] = placed_setups(setups_of(Layout()), hosts[:1], threads=1)
    assert alone.peers == Peers()
