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
