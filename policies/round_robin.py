"""Replicas in turn."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from eventlm.core.plugin import ReplicaView, RequestView, Router


class RoundRobin(Router, frozen=True, kw_only=True):
    """Requests go to the replicas in turn, as they arrive."""

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        return replicas[request.ordinal % len(replicas)].index
