"""All requests of a session to the same replica, for as long as that is up and not far busier than the others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated

from msgspec import Meta

from eventlm.core.plugin import ReplicaView, RequestView, Router, contenders, home_of


class SessionAffinity(Router, frozen=True, kw_only=True):
    """A request goes where its session belongs, unless that has far more to do than the least loaded replica.

    A replica that comes or goes moves only the sessions that are its own. A request without a session goes to the least
    loaded replica.
    """

    #: How many more tokens (admitted and waiting) the replica of a session may have to do than the least loaded one.
    spill_tokens: Annotated[int, Meta(ge=0)] = 8_192

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        likely = (replicas[position] for position in contenders(replicas, 0))
        lightest = min(likely, key=lambda r: (_load(r), r.index))
        if not request.session:
            return lightest.index
        home = replicas[home_of(replicas, request.session)]
        return home.index if _load(home) - _load(lightest) <= self.spill_tokens else lightest.index


def _load(replica: ReplicaView) -> int:
    return replica.admitted_tokens + replica.waiting_tokens
