"""Sockets that are passed over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket

from eventlm.system.passed_sockets import PassedSockets
from tests.processes import until


async def test_they_arrive_in_order_and_are_closed_here() -> None:
    ours, theirs = socket.socketpair()
    arrived: list[tuple[int, socket.socket]] = []
    receiver = PassedSockets(theirs, lambda number, passed: arrived.append((number, passed)))
    sender = PassedSockets(ours, lambda *_: None)
    pairs = [socket.socketpair() for _ in range(3)]
    for number, (_, far) in enumerate(pairs, start=70_000):
        sender.send(number, far)
        assert far.fileno() == -1
    await until(lambda: len(arrived) == 3)
    for (near, _), (number, passed) in zip(pairs, arrived, strict=True):
        near.sendall(str(number).encode())
        assert passed.recv(16) == str(number).encode()
        assert not os.get_inheritable(passed.fileno())
        near.close()
        passed.close()
    sender.close()
    receiver.close()


async def test_the_end_of_the_other_side_is_told_once_and_loses_what_is_sent() -> None:
    ours, theirs = socket.socketpair()
    lost: list[bool] = []
    sender = PassedSockets(ours, lambda *_: None, lambda: lost.append(True))
    theirs.close()
    near, far = socket.socketpair()
    sender.send(1, far)
    # Nobody has it, so whoever is at its other end learns that.
    assert near.recv(1) == b""
    near.close()
    await until(lambda: lost)
    await asyncio.sleep(0)
    assert lost == [True]
    sender.close()
