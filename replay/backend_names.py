"""The other servers of a run by their addresses."""

from __future__ import annotations

from eventlm.config.backends import BackendSpec
from eventlm.events import Header


def names_at_start(header: Header) -> dict[int, str]:
    """By replica, the servers that the header names. More may come while the engine runs."""
    names: dict[int, str] = {}
    first = 0
    for each in header.sets:
        described = each.host.get("backends", []) if each.core.forwards else []
        for replica, backend in enumerate(described[: each.core.num_replicas], first):
            names[replica] = BackendSpec(url=backend["url"]).name
        first += each.core.num_replicas
    return names


def replica_names(header: Header) -> list[str]:
    """What each replica is called: `replica 0`, or as another server `backend 0, host:8000`."""
    names = names_at_start(header)
    found = []
    for replica, core in enumerate(header.cores_of_replicas()):
        name = f", {names[replica]}" if replica in names else ""
        found.append(f"backend {replica}{name}" if core.forwards else f"replica {replica}")
    return found
