"""A link is cut between the engine and a node, each of which has a network of its own. It takes the rights of root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.events import WorkerLost
from tests.launchers.ray.cluster import processes_of, running_cluster, worker_pids
from tests.processes import is_running, wait_until
from tests.serving import Server, verified

pytestmark = pytest.mark.soak

BRIDGE, HEAD = "eventlm-br", "10.213.77.1"
NODES = ("eventlm-a", "eventlm-b")


def ip(*arguments: str, check: bool = True) -> bool:
    """Whether `ip ARGUMENTS` succeeds."""
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr
    return done.returncode == 0


def remove_networks() -> None:
    for name in NODES:
        ip("netns", "del", name, check=False)
    ip("link", "del", BRIDGE, check=False)


@pytest.fixture
def networks() -> Iterator[None]:
    """A bridge, and a namespace for each node with a link to it of the same name."""
    if os.geteuid() or not ip("link", "add", BRIDGE, "type", "bridge", check=False):
        pytest.skip("no network namespaces can be made")
    try:
        ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(NODES, 2):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        remove_networks()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Nodes may be, for the next test."""


def test_ranks_behind_a_cut_link_leave_and_the_others_serve(networks: None, tmp_path: Path) -> None:
    with running_cluster(0, HEAD) as cluster:
        for number, name in enumerate(NODES, 2):
            cluster.add(1, address=f"10.213.77.{number}", within=("ip", "netns", "exec", name))
        cluster.wait()
        flags = ("--model", "fake", "--replicas", "2", "--heartbeat-timeout-seconds", "5", "--router", "round_robin")
        where = f"ray:address={cluster.address},placement=strict_spread"
        server = Server(tmp_path, *flags, "--launcher", where)
        try:
            server.wait_ready()
            cut, other = cluster.nodes
            assert [len(worker_pids(node)) for node in cluster.nodes] == [1, 1]
            [first] = worker_pids(cut)

            # Shorter than Ray bears it: the replica comes back where it was.
            ip("link", "set", NODES[0], "down")
            wait_until(lambda: server.figure("eventlm:replica_up") == 1)
            ip("link", "set", NODES[0], "up")
            wait_until(lambda: server.figure("eventlm:replica_up") == 2)
            assert not is_running(first)
            [lost] = worker_pids(cut)
            assert all(server.complete().status == 200 for _ in range(4))

            # Longer: Ray drops the node, which has to join anew.
            ip("link", "set", NODES[0], "down")
            wait_until(lambda: server.figure("eventlm:replica_up") == 1)
            wait_until(lambda: not is_running(lost))
            assert all(server.complete().status == 200 for _ in range(4))
            wait_until(lambda: server.request("GET", "/health").json().get("waiting_for_room") == 1)
            ip("link", "set", NODES[0], "up")
            cut.kill()
            cluster.nodes.remove(cut)
            cluster.add(1, address="10.213.77.2", within=("ip", "netns", "exec", NODES[0])).wait()
            wait_until(lambda: server.figure("eventlm:replica_up") == 2)
            assert all(server.complete().status == 200 for _ in range(4))
            assert processes_of(other)
            server.stop()
        finally:
            server.close()
    reasons = [event.reason for event in verified(server.trace).of(WorkerLost)]
    assert reasons == ["on 10.213.77.2: no heartbeat for 5 s"] * 2
