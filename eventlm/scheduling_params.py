"""Scheduling parameters: the part of a request that the scheduler may see before it runs."""

from __future__ import annotations

from msgspec import Struct

from eventlm.types import ModelRoute, RequestKind

#: Of a request's `priority`: after everything else. Lines of batches have it.
LOWEST_PRIORITY = 2**31 - 1


class SchedulingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to schedule one request. It has no content, so the trace records it unchanged.

    kind: what the request wants. skip_cache_read: compute the whole prompt, even where the cache holds some of it.
    adapter: empty for none. priority: lower goes first. deadline_ns, slo_ttft_ns: from arrival to the first token;
    slo_tpot_ns: between tokens; 0 where the request has none. drop_if_late: end the request when its deadline passes
    before its first token. session, parent: integers that the engine gave out; 0 for none. received_ns, ready_ns: when
    the socket accepted the request and when its prompt was tokenized, on the engine's clock. has_text_ends: the client
    side looks for ends in the text, so each sequence finishes in two phases. waits_for_grammar: it cannot start before
    its grammar is built. offline: the queue's length does not limit its group. front_end: the process that submitted
    it; 0 is the engine's own. asked_model, route: the model that the client asked for, where `model` is another, and
    why that is.
    """

    model: str
    kind: RequestKind = "generate"
    skip_cache_read: bool = False
    adapter: str = ""
    priority: int = 0
    deadline_ns: int = 0
    slo_ttft_ns: int = 0
    slo_tpot_ns: int = 0
    service_class: str = ""
    drop_if_late: bool = False
    session: int = 0
    parent: int = 0
    received_ns: int = 0
    ready_ns: int = 0
    has_text_ends: bool = False
    waits_for_grammar: bool = False
    offline: bool = False
    front_end: int = 0
    asked_model: str = ""
    route: ModelRoute = ""

    @property
    def is_branch(self) -> bool:
        """Whether it belongs to a search whose first request stands for all of them."""
        return self.offline and self.parent > 0
