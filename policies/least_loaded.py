"""The replica with the least to do."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from eventlm.core.plugin import ReplicaView, RequestView, Router, contenders


class LeastLoaded(Router, frozen=True, kw_only=True):
    """A request goes, as it arrives, to the replica with the fewest admitted and waiting tokens."""

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        likely = (replicas[position] for position in contenders(replicas, 0))
        return min(likely, key=lambda r: (r.admitted_tokens + r.waiting_tokens, r.index)).index
