"""One queue for all replicas."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from eventlm.core.plugin import ReplicaView, RequestView, Router


class Pull(Router, frozen=True, kw_only=True):
    """One queue for all: a sequence goes to the first replica that has room for it."""

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        return None
