"""The engine's end of its driver of Ray, whose other end is a script here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.launchers.launcher import LaunchError
from eventlm.launchers.ray import driver_link
from eventlm.launchers.ray.driver_link import DriverLink
from eventlm.launchers.ray.messages import HostFacts, PlaceReplica
from eventlm.launchers.ray.placement import Bundle
from eventlm.system.system import real_system
from tests.processes import PATIENCE_SECONDS, is_running, until

#: A driver that does what each message asks for at once, or what `SAYS` has for it.
SCRIPT = """
import asyncio, socket, sys
from eventlm.launchers.ray.messages import *
from eventlm.system.frames import FrameConnection

{says}

def answers(message):
    match message:
        case Connect():
            yield Connected(address="10.0.0.1", nodes=[])
        case PlaceReplica(replica=7):
            yield Refused(replica=7, message="no room", no_room=True)
        case PlaceReplica():
            yield Placed(replica=message.replica, hosts=[HostFacts(host="a")])
        case StartRank():
            run = dict(replica=message.replica, rank=message.rank, run=message.run)
            yield Started(**run, pid=message.run)
            yield Said(**run, output=" ".join(message.arguments).encode())
        case KillRank():
            run = dict(replica=message.replica, rank=message.rank, run=message.run)
            yield RankEnded(**run, exit_code=-9)
            yield Said(**run, output=b"")

async def main():
    lost = asyncio.Event()
    connection = None
    def take(frame):
        for answer in globals().get("says", answers)(decode_to_driver(frame)):
            connection.send(encode(answer))
    connection = await FrameConnection.open(socket.socket(fileno=int(sys.argv[1])), take, lost.set)
    await lost.wait()

asyncio.run(main())
"""
WANTED = PlaceReplica(replica=0, bundles=[Bundle(1, 1)], strategy="pack", timeout_s=60)

Write = Callable[[str], None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the driver."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(driver_link, "MODULE", "stub_driver")

    def write(says: str = "") -> None:
        (tmp_path / "stub_driver.py").write_text(SCRIPT.format(says=says))

    write()
    return write


async def opened(timeout_s: float = PATIENCE_SECONDS) -> DriverLink:
    return await DriverLink.open(real_system(), "auto", timeout_s)


async def test_a_place_and_a_process_from_start_to_end(driver: Write) -> None:
    link = await opened()
    try:
        assert (link.address, link.nodes) == ("10.0.0.1", [])
        assert await link.place(WANTED) == [HostFacts(host="a")]
        processes = [link.run(0, rank, "a.module", [f"rank {rank}"], {}, {}) for rank in range(2)]
        for process in processes:
            await process.started()
        assert [process.pid for process in processes] == [1, 2]
        processes[1].kill()
        assert await processes[1].wait() == -9
        assert processes[1].stdout is not None
        assert await processes[1].stdout.read() == b"rank 1"
        assert processes[0].returncode is None
        link.leave(0)
    finally:
        await link.close()
    assert processes[0].returncode is not None


async def test_no_room_is_for_now(driver: Write) -> None:
    link = await opened()
    try:
        with pytest.raises(LaunchError, match="no room") as caught:
            await link.place(PlaceReplica(replica=7, bundles=[], strategy="pack", timeout_s=1))
        assert caught.value.waits_for_room
        assert await link.place(WANTED) == [HostFacts(host="a")]
    finally:
        await link.close()


async def test_with_its_driver_all_is_lost(driver: Write) -> None:
    link = await opened()
    process = link.run(0, 0, "a.module", ["x"], {}, {})
    await process.started()
    os.kill(link.pid, signal.SIGKILL)
    assert await process.wait() == 1
    assert (process.reason, process.is_end_of_all) == ("the driver of Ray died", True)
    await until(lambda: link.is_lost)
    with pytest.raises(LaunchError, match="the driver of Ray died"):
        await link.place(WANTED)
    late = link.run(0, 0, "a.module", ["x"], {}, {})
    await asyncio.wait_for(late.started(), PATIENCE_SECONDS)
    assert late.reason == "the driver of Ray died"
    await link.close()


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("def says(message): return [Refused(message='other version')]", "other version$"),
        ("def says(message): return [Refused(message='there is none', no_room=True)]", "there is none; start one with"),
        ("def says(message): return []", r"it has not answered in 0\.5 s; start one with `ray start --head`"),
        ("sys.exit(3)", "the driver of Ray died$"),
    ],
    ids=["refused", "none", "silent", "dies"],
)
async def test_a_cluster_that_cannot_be_joined(driver: Write, says: str, message: str) -> None:
    driver(says)
    where = r"^cannot join a Ray cluster \(address=auto: that of RAY_ADDRESS, else one that runs on this host\): "
    with pytest.raises(LaunchError, match=where + message):
        await opened(0.5 if "[]" in says else PATIENCE_SECONDS)


async def test_a_driver_ends_with_its_link(driver: Write) -> None:
    link = await opened()
    await link.close()
    assert not is_running(link.pid)
    await link.close()
