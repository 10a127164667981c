"""Sockets to accept connections from. Processes inherit them, and connections wait in them for the next process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from itertools import chain

from eventlm.errors import UsageError

#: Length of the queue of connections to accept. The system may have a lower limit.
BACKLOG = 4096
_MAX_PORT = 65535


async def check_address(host: str, port: int) -> None:
    """Raise UsageError if the address cannot be bound."""
    server = await _bind(host, port)
    server.close()
    await server.wait_closed()


async def bind_sockets(host: str, port: int, num_processes: int) -> list[list[socket.socket]]:
    """Listening sockets for each process, one for each address of the host. The kernel distributes connections.

    Clients that connect wait until a process accepts them. Raises UsageError if the address cannot be bound.
    """
    # With SO_REUSEPORT a second server of the same user could bind the port, so check without it first.
    await check_address(host, port)
    server = await _bind(host, port, reuse_port=True, start_serving=False)
    first = [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
    server.close()
    await server.wait_closed()
    groups = [first, *([_twin(bound) for bound in first] for _ in range(num_processes - 1))]
    for bound in chain.from_iterable(groups):
        bound.listen(BACKLOG)
    return groups


def _twin(bound: socket.socket) -> socket.socket:
    """Another socket of the same address, with its own queue."""
    twin = socket.socket(bound.family, bound.type, bound.proto)
    for level, option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.SOL_SOCKET, socket.SO_REUSEPORT)):
        twin.setsockopt(level, option, 1)
    if bound.family == socket.AF_INET6:
        twin.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    twin.setblocking(False)
    twin.bind(bound.getsockname())
    return twin


async def _bind(host: str, port: int, *, reuse_port: bool = False, start_serving: bool = True) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            asyncio.Protocol,
            host,
            port,
            backlog=BACKLOG,
            reuse_port=reuse_port,
            start_serving=start_serving,
        )
    except (OSError, OverflowError, UnicodeError) as error:
        # uvloop changes the system's messages. Errors of name resolution have no errno.
        number = error.errno or 0 if isinstance(error, OSError) else 0
        reason = os.strerror(number) if number in errno.errorcode else getattr(error, "strerror", None) or str(error)
        remedy = "choose another address with --host and --port"
        if number == errno.EADDRINUSE:
            other = port + 1 if port < _MAX_PORT else port - 1
            remedy = (
                f"another eventlm may be running there; give another port, such as --port {other}, or --port 0 for "
                "one that is free"
            )
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from error
