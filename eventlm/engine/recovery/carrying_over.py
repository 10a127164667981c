"""Requests of a run come into another one: that of an engine with other limits or plug-ins, or of another version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import structlog
from msgspec import UNSET

from eventlm.core.carrying import carry
from eventlm.core.core import Core
from eventlm.core.state.replicaset import SetParts
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.recovery.dead_run import CarriedRequests
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.setup import EngineSetup
from eventlm.engine.spool.records import KeptRequest
from eventlm.events import Arrived, Header
from eventlm.events.markers import ReplicasetRecord

log = structlog.get_logger("eventlm.engine")


def carry_over(
    carried: CarriedRequests,
    header: Header,
    setups: Sequence[EngineSetup],
    parts: Sequence[SetParts],
    live: LiveRequests,
    registry: RequestRegistry,
) -> Core:
    """A core that goes on with the requests, which `live` and `registry` take in. header: of the run that begins.
    setups, parts: of each replicaset.

    A reply goes on with all its requests, or is lost.
    """
    arrivals, going_on = carried.state.arrivals, dict[int, Arrived]()
    num_lost = Counter(dict.fromkeys(["a part of it was lost"], len(carried.damaged)))
    for kept in carried.replies:
        found = (_obstacle(each, carried, header, setups) for each in kept.live)
        if obstacle := next(filter(None, found), ""):
            num_lost[obstacle] += sum(each.seq not in carried.damaged for each in kept.live)
            continue
        for each, sink in zip(kept.live, registry.restore(kept), strict=True):
            going_on[each.seq] = live.carry(each, arrivals[each.seq], sink)
    for obstacle, number in num_lost.items():
        if number:
            log.error("requests cannot go on", reason=obstacle, requests=number)
    first, *others = parts
    return carry(carried.state, going_on, *first, others)


def _obstacle(kept: KeptRequest, carried: CarriedRequests, header: Header, setups: Sequence[EngineSetup]) -> str:
    """Why a request cannot go on with an engine of these setups; empty if it can."""
    request = kept.request
    model = request.scheduling.model
    if kept.seq in carried.damaged:
        return "another request of its reply was damaged"
    before, number = _set_of(model, carried.header.sets), _set_of(model, header.sets)
    is_served = model in header.sets[number].core.models or not before
    # The first set also serves what has a name that it no longer has.
    if not is_served or carried.header.sets[before].model_fingerprint != header.sets[number].model_fingerprint:
        return f"the model {model!r} is no longer served"
    core = setups[number].core
    if (request.forwarded is None) != (core.forwards is UNSET):
        return f"the model {model!r} is served in another way"
    if len(request.prompt_token_ids) + request.max_tokens > core.max_model_len:
        return f"the context has {core.max_model_len} tokens now (--max-model-len)"
    return ""


def _set_of(model: str, sets: Sequence[ReplicasetRecord]) -> int:
    """The number of the set that serves a model, as `LiveRequests` finds it."""
    return next((number for number, each in enumerate(sets) if model in each.core.models), 0)
