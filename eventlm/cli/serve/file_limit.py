"""How many files the process of a server may open."""

from __future__ import annotations

import resource

from msgspec import structs

from eventlm.config import ServerConfig

#: Open files for everything but connections: the trace, sockets to workers, libraries.
_OTHER_FILES = 256


def raise_file_limit(config: ServerConfig, *, forwards: bool) -> tuple[ServerConfig, list[str]]:
    """Let this process and its children open as many files as there may be connections; where the system's limit is
    lower, a configuration of fewer connections and a warning. forwards: to backends, over connections of this process.

    Shells allow a process 1,024 files although the system would give it many more.
    """
    # With front ends, those of clients are not in this process.
    num_each = 2 if forwards and not config.api_servers else 1
    needed = num_each * config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return config, []
    fewer = max((allowed - _OTHER_FILES) // num_each, 1)
    warning = (
        f"at most {fewer} connections: --max-connections {config.max_connections} needs {needed} open files and the "
        f"system allows {hard}; raise that (ulimit -Hn) or lower the connections"
    )
    return structs.replace(config, max_connections=fewer), [warning]
