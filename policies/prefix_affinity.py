"""The replica that has most of the prompt, weighed against how busy it is (after SGLang's cache-aware router, 2024)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, ClassVar

from msgspec import Meta

from eventlm.core.plugin import ReplicaView, RequestView, Router, contenders


class PrefixAffinity(Router, frozen=True, kw_only=True):
    """A request goes where most of its prompt is cached, or soon will be, unless others have much less to do.

    A replica is passed over once it has more than `weight` tokens more to do (admitted and waiting) for each prompt
    token that another would have to compute in addition. Without a shared prefix that is the least loaded replica.
    Ties go in turn, so that new prefixes fill all caches, not always the first one.
    """

    #: Tokens of load that one cached token outweighs; 0: load alone decides.
    weight: Annotated[int, Meta(ge=0)] = 8

    reads_prefixes: ClassVar[bool] = True

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        def cost(index: int) -> tuple[int, int, int]:
            replica = replicas[index]
            load = replica.admitted_tokens + replica.waiting_tokens
            turn = (index - request.ordinal) % len(replicas)
            return load - self.weight * replica.prefix_tokens, load, turn

        return replicas[min(contenders(replicas, request.ordinal), key=cost)].index
