"""Backends whose list may change while a server runs: the addresses of a name, and the lines of a file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import structlog

from eventlm.config.backends import BackendSpec, DnsBackends, FileBackends, read_backends_file
from eventlm.errors import ExitCode, UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk

log = structlog.get_logger("eventlm.backend")


async def list_backends(source: DnsBackends | FileBackends, disk: Disk = SYSTEM_DISK) -> list[BackendSpec]:
    """Those of now. Raises UsageError if the name is not known or the file cannot be read."""
    if isinstance(source, FileBackends):
        return read_backends_file(source, disk)
    found = await addresses_of(source.host)
    if not found:
        message = f"--backend dns:{source.host}:{source.port}: the name {source.host} is not known"
        # A headless Service has no addresses until a pod is ready.
        raise UsageError(message, exit_code=ExitCode.FAILED)
    return [source.at(address) for address in found]


async def watch(
    source: DnsBackends | FileBackends, specs: list[BackendSpec], *, seconds: float, disk: Disk = SYSTEM_DISK
) -> AsyncGenerator[list[BackendSpec]]:
    """All backends of a source: those that were found before, and then those of now, every so many seconds.

    While it cannot be read, which is logged, those of before.
    """
    problem = ""
    yield specs
    while True:
        try:
            specs, problem = await list_backends(source, disk), ""
        except UsageError as error:
            if str(error) != problem:
                problem = str(error)
                log.warning("backends cannot be listed; those that are there stay", reason=problem)
        yield specs
        await asyncio.sleep(seconds)


async def addresses_of(host: str) -> list[str]:
    """Those of a name or an address, in order; none if it is not known."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # The latter: a label of the name is empty or too long.
        return []
    return sorted({str(info[4][0]) for info in infos})
