"""Open files: a connection is one, and shells allow a process 1,024 although the system would give it many more."""

from __future__ import annotations

import resource
from typing import NamedTuple

from msgspec import structs

from eventlm.config import ServerConfig

#: For everything but connections: the trace, sockets to workers, libraries.
OTHER_FILES = 256


class Allowed(NamedTuple):
    """The configuration that the system's limits allow, and what the user should know of that."""

    config: ServerConfig
    warnings: list[str]


def raise_file_limit(config: ServerConfig) -> Allowed:
    """Let this process and its children have as many files as there may be connections; if that cannot be had, there
    may be fewer connections.
    """
    needed = config.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return Allowed(config, [])
    fewer = max(allowed - OTHER_FILES, 1)
    warning = (
        f"at most {fewer} connections: --max-connections {config.max_connections} needs {needed} open files and the "
        f"system allows {hard}; raise that (ulimit -Hn) or lower the connections"
    )
    return Allowed(structs.replace(config, max_connections=fewer), [warning])
