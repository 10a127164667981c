"""Backends whose list may change while a server runs: the addresses of a name, and the lines of a file."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator

import structlog

from eventlm.config.backends import BackendSpec, DnsBackends, FileBackends, read_backends_file
from eventlm.errors import ExitCode, UsageError

log = structlog.get_logger("eventlm.backend")


async def list_backends(source: DnsBackends | FileBackends) -> list[BackendSpec]:
    """Those of now. Raises UsageError if the name is not known or the file cannot be read."""
    if isinstance(source, FileBackends):
        return read_backends_file(source)
    found = await addresses_of(source.host)
    if not found:
        message = f"--backend dns:{source.host}:{source.port}: the name {source.host} is not known"
        # A headless Service has no addresses until a pod is ready.
        raise UsageError(message, exit_code=ExitCode.FAILED)
    return [source.at(address) for address in found]


async def watch(source: DnsBackends | FileBackends, *, seconds: float) -> AsyncGenerator[list[BackendSpec]]:
    """All backends of a source, now and every so many seconds.

    While it cannot be read, which is logged, those of before.
    """
    state: object = ()
    specs: list[BackendSpec] | None = None
    while True:
        if (found := await _state(source)) != state:
            state = found
            try:
                specs = await list_backends(source)
            except UsageError as error:
                log.warning("backends cannot be listed; those that are there stay", reason=str(error))
        if specs is not None:
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


async def _state(source: DnsBackends | FileBackends) -> object:
    """Changes with the list."""
    if isinstance(source, DnsBackends):
        return await addresses_of(source.host)
    try:
        found = os.stat(source.path)
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_size, found.st_mtime_ns
