"""Processes that are killed at each of their calls into the system."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world.machine.host import WorldPipes, system_of
from tests.world.machine.loop import Killed
from tests.world.machine.process import Child, Death, Process, When
from tests.world.machine.spawn_faults import Module
from tests.world.machine.world import World

PORT = ("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def _ignore_the_dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ignore errors of dead processes' objects: when collected, they try in vain to shut down cleanly."""
    before = sys.unraisablehook

    def hear(error: Any) -> None:
        if not isinstance(error.exc_value, Killed):
            before(error)

    monkeypatch.setattr(sys, "unraisablehook", hear)
    yield
    gc.collect()


class _Peer(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data


class _Seen:
    """What others see of a process: bytes sent, files, messages, children."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peer = _Peer()
        self.messages: list[bytes] = []
        self.children: list[Process] = []

    def as_list(self) -> list[Any]:
        names = set(self.world.disk.of("reader").list(Path("/")))
        return [
            bytes(self.peer.received),
            sorted(names),
            self.messages,
            [each.returncode for each in self.children],
        ]


def _run(death: Death | None) -> tuple[_Seen, Process]:
    """Run a process that makes one call of each kind, and all of them again in the `finally` blocks that its death
    unwinds.
    """
    world = World(1)
    seen = _Seen(world)
    other, mortal = Process(world, "other"), Process(world, "mortal")

    async def listen() -> int:
        listening = world.network.listen(other, PORT)

        def accept() -> None:
            end, _ = listening.accept()
            other.loop.create_task(other.loop.connect_accepted_socket(lambda: seen.peer, end))

        other.loop.add_reader(listening, accept)
        await asyncio.sleep(100)
        return 0

    def be_child(process: Process, child: Child, arguments: Any) -> None:
        seen.children.append(process)
        world.pipes[arguments[0]].open_child(process, lambda frames: seen.messages.append(frames[0]))

    system = system_of(mortal, {"child": Module(be_child, be_child)})

    async def act() -> int:
        transport, _ = await mortal.loop.create_connection(asyncio.Protocol, *PORT)
        pipe = system.pipes.open()
        child = await system.processes.spawn("child", pipe.addresses[0], stdout=subprocess.DEVNULL)
        file = system.disk.create(Path("/file"))
        try:
            await asyncio.sleep(1)
            transport.write(b"12345678")
            pipe.send(b"message")
            file.write(b"line")
            await asyncio.to_thread(lambda: system.disk.make_folder(Path("/of a thread")))
            child.kill()
        finally:
            transport.write(b"finally")
            pipe.send(b"finally")
            file.write(b"finally")
            system.disk.make_folder(Path("/finally"))
            world.network.listen(mortal, ("127.0.0.1", 2))
            transport.abort()
        return 0

    other.run(listen())
    mortal.death = death
    mortal.run(act())
    world.run_for(50)
    return seen, mortal


@pytest.mark.parametrize("when", ["before", "halfway", "after"])
def test_nothing_that_a_dead_process_does_has_an_effect(when: When) -> None:
    whole, process = _run(None)
    assert process.returncode == 0
    assert process.num_calls > 12
    for call in range(1, process.num_calls + 1):
        seen, mortal = _run(Death(call, when))
        assert mortal.returncode == -9
        assert mortal.num_calls == call
        assert mortal.errors == []
        assert not mortal.handles
        received, names, messages, children = seen.as_list()
        _, all_names, all_messages, _ = whole.as_list()
        assert bytes(whole.peer.received).startswith(received)
        assert messages == all_messages[: len(messages)]
        assert {*names} <= {*all_names}
        assert len(children) <= 1
        with pytest.raises(Killed):
            mortal.begin_call()


def test_a_send_that_is_cut_halfway_sends_the_first_half() -> None:
    _, process = _run(None)
    found = {bytes(_run(Death(call, "halfway"))[0].peer.received) for call in range(1, process.num_calls + 1)}
    assert b"1234" in found


def test_a_message_that_has_not_left_a_process_is_lost_with_it() -> None:
    found = set()
    for seed in range(20):
        world = World(seed)
        parent, child, taken = Process(world, "parent"), Process(world, "child"), []
        pipe = WorldPipes(parent).open()
        pipe.open_child(child, lambda frames, taken=taken: taken.append(frames[0]))  # type: ignore[misc]
        for number in range(3):
            pipe.send(bytes([number]))
        world.after(60_000, parent.kill)
        world.run_for(1)
        assert taken == [bytes([number]) for number in range(len(taken))]
        found.add(len(taken))
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("when", ["before", "halfway", "after"])
def test_a_process_that_dies_while_it_reads_a_file_is_gone(when: When) -> None:
    world = World(1)
    process = Process(world, "p")
    disk = world.disk.of("p")
    process.death = Death(4, when)

    async def read() -> int:
        disk.create(Path("/file")).write(b"words")
        disk.open(Path("/file")).read(5)
        return 0

    process.run(read())
    world.run_for(1)
    assert (process.returncode, world.processes, world.disk.open_files("p"), world.errors) == (-9, [], [], [])
