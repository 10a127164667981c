"""Sockets that several processes accept connections from."""

from __future__ import annotations

import socket

import pytest

from eventlm.errors import UsageError
from eventlm.system.listening_sockets import bind_sockets, check_address


async def test_all_processes_share_one_free_port_and_connections_wait() -> None:
    groups = await bind_sockets("127.0.0.1", 0, 2)
    try:
        [address] = {each.getsockname() for group in groups for each in group}
        assert address[1] > 0
        with socket.create_connection(address) as client:
            client.sendall(b"hi")
            accepted = [connection for group in groups for each in group if (connection := _accept(each)) is not None]
            assert [connection.recv(2) for connection in accepted] == [b"hi"]
            accepted[0].close()
    finally:
        for group in groups:
            for each in group:
                each.close()


def _accept(listening: socket.socket) -> socket.socket | None:
    try:
        return listening.accept()[0]
    except BlockingIOError:
        return None


async def test_a_port_in_use_is_named_although_both_could_share_it() -> None:
    [[bound]] = await bind_sockets("127.0.0.1", 0, 1)
    with bound:
        port = bound.getsockname()[1]
        for attempt in (check_address("127.0.0.1", port), bind_sockets("127.0.0.1", port, 1)):
            with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}: .*give another port"):
                await attempt
    await check_address("127.0.0.1", port)
