"""What an operator can ask of a running engine. A request that changes the core's state is a fact, so replay has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Union

from msgspec import UNSET, Struct, UnsetType

from eventlm.config.options import did_you_mean
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.engine.backends.actions import BackendAction
from eventlm.engine.backends.backend_set import BackendStatus
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request import BY_OPERATOR, UnknownReplyError
from eventlm.engine.request_registry import Reply, RequestRegistry
from eventlm.errors import EventLMError
from eventlm.events import CacheFlushed, Cancelled, Fact, Paused, PolicySwapped, Resumed
from eventlm.scheduling_params import LOWEST_PRIORITY

if TYPE_CHECKING:
    from eventlm.engine.engine_core import EngineCore


class Drain(Struct, frozen=True, tag="drain"):
    """Take no more requests; those already admitted go on."""


class Pause(Struct, frozen=True, tag="pause"):
    """Launch nothing more. Requests are still accepted and wait."""


class Resume(Struct, frozen=True, tag="resume"):
    """The end of a drain and of a pause."""


class SwapPolicy(Struct, frozen=True, tag="policy"):
    """Order the requests by another of the policies installed at start."""

    name: str


class FlushCache(Struct, frozen=True, tag="flush_cache"):
    """Forget the cached prefix blocks that no sequence uses."""


class Abort(Struct, frozen=True, tag="abort"):
    """End a request, by its reply's public id, its own (`x-request-id`), or the seq of its arrival."""

    request: str


class Restart(Struct, frozen=True, tag="restart"):
    """Let an engine with the code and the configuration that are on the disk go on in this one's place."""


class ReadStatus(Struct, frozen=True, tag="status"):
    """Return the status and change nothing."""


AdminAction = Union[Drain, Pause, Resume, SwapPolicy, FlushCache, Abort, Restart, ReadStatus, BackendAction]  # noqa: UP007


class UnknownPolicyError(EventLMError):
    """The policy was not installed at start."""


class UnknownRequestError(EventLMError):
    """No such request is under way."""


class AmbiguousRequestError(EventLMError):
    """Several replies under way have this id."""


class RestartError(EventLMError):
    """No other engine can take over."""


class FlushedCache(Struct, frozen=True, kw_only=True):
    """The blocks that a flush removed from the prefix caches, and from how many replicas."""

    num_blocks: int
    num_replicas: int


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """One replica. Cached blocks are those that can be hit; held ones belong to sequences; some are both."""

    replica: int
    up: bool
    epoch: int
    num_running: int
    num_steps_in_flight: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int


class EngineStatus(Struct, frozen=True, kw_only=True):
    """An engine at a glance. `policies` are those that can be swapped in; `policy` is the one in force. `flushed`: the
    answer to a flush only. `replicas`: those with workers; `backends`: other servers, if any model has some.
    `num_at_lowest_priority`: of the requests, those such as the lines of batches.
    """

    state: Literal["loading", "ready", "draining", "dead"]
    paused: bool
    policy: str
    policies: list[str]
    num_requests: int
    num_at_lowest_priority: int
    num_waiting: int
    replicas: list[ReplicaStatus]
    flushed: FlushedCache | UnsetType = UNSET
    backends: list[BackendStatus] | UnsetType = UNSET


def carry_out(
    action: AdminAction, engine_core: EngineCore, registry: RequestRegistry, drain: Callable[[], None]
) -> FlushedCache | UnsetType:
    """Queue the facts of a request; returns what a flush will remove. drain: applies what is queued as one tick.

    Raises UnknownPolicyError, UnknownRequestError or AmbiguousRequestError.
    """
    flushed: FlushedCache | UnsetType = UNSET
    if isinstance(action, FlushCache):
        # In a tick of its own, so that nothing else happens to what is counted.
        drain()
        flushed = _flushable(engine_core.core.state)
    for fact in _facts_of(action, engine_core.core.state, engine_core.live, registry):
        engine_core.put_fact(fact)
    return flushed


def _facts_of(action: AdminAction, state: CoreState, live: LiveRequests, registry: RequestRegistry) -> list[Fact]:
    match action:
        case Pause():
            return [] if state.paused else [Paused()]
        case Resume():
            return [Resumed()] if state.paused else []
        case SwapPolicy(name):
            sets = state.replicasets
            having = [each for each in sets if name in each.plugins.policies]
            if not having:
                installed = dict.fromkeys(policy for each in sets for policy in each.plugins.policies)
                hint = did_you_mean(name, installed, listed_as="installed at start")
                raise UnknownPolicyError(f"unknown policy {name!r}{hint}; others need --extra-policy NAME at the start")
            if len(having) == len(sets):
                return [PolicySwapped(name=name)]
            return [PolicySwapped(name=name, replicaset=each.index) for each in having]
        case FlushCache():
            return [CacheFlushed()]
        case Abort(name):
            requests = _named(name, live, registry)
            if not requests:
                raise UnknownRequestError(f"no request '{name}' is under way")
            return [Cancelled(c=request, request=request, reason=BY_OPERATOR) for request in requests]
        case _:
            return []


def _named(request: str, live: LiveRequests, registry: RequestRegistry) -> list[int]:
    """The requests under way with an id. Only the server chooses the ids of replies, so those go first."""
    named = {reply.submission.reply_id: reply.requests for reply in registry.replies_named(request)}
    if request.isascii() and request.isdecimal() and len(request) < 17:
        seq = int(request)
        reply = registry.reply_of(seq)
        named.setdefault(reply.submission.reply_id if reply is not None else request, [seq])
    found = {name: alive for name, seqs in named.items() if (alive := [seq for seq in seqs if seq in live])}
    if len(found) > 1:
        raise _ambiguous(request, list(found))
    return next(iter(found.values()), [])


def reply_named(name: str, registry: RequestRegistry) -> Reply:
    """The reply of any owner with an id: its own, its request's, or the seq of an arrival. Raises UnknownReplyError or
    AmbiguousRequestError.
    """
    replies = registry.replies_named(name)
    if not replies and name.isascii() and name.isdecimal() and len(name) < 17:
        replies = [reply for reply in [registry.reply_of(int(name))] if reply is not None]
    if not replies:
        raise UnknownReplyError(f"there is no reply with the id '{name}', or it is no longer kept")
    if len(replies) > 1:
        raise _ambiguous(name, [reply.submission.reply_id for reply in replies])
    return replies[0]


def _ambiguous(name: str, reply_ids: Sequence[str]) -> AmbiguousRequestError:
    return AmbiguousRequestError(
        f"{len(reply_ids)} replies have a request with the id {name!r}; give a reply's own id: {', '.join(reply_ids)}"
    )


def _flushable(state: CoreState) -> FlushedCache:
    """What a flush would remove now."""
    return FlushedCache(
        num_blocks=sum(replica.pool.num_idle for replica in state.replicas), num_replicas=len(state.replicas)
    )


def status_of(
    engine_state: Literal["loading", "ready", "draining", "dead"],
    state: CoreState,
    *,
    flushed: FlushedCache | UnsetType = UNSET,
    backends: list[BackendStatus] | UnsetType = UNSET,
) -> EngineStatus:
    """The engine as it is now."""
    return EngineStatus(
        state=engine_state,
        paused=state.paused,
        policy=state.policy_name,
        policies=list(dict.fromkeys(policy for each in state.replicasets for policy in each.plugins.policies)),
        num_requests=len(state.requests),
        num_at_lowest_priority=sum(
            request.arrival.scheduling.priority == LOWEST_PRIORITY for request in state.requests.values()
        ),
        num_waiting=state.num_waiting,
        replicas=replica_statuses(state),
        flushed=flushed,
        backends=backends,
    )


def replica_statuses(state: CoreState) -> list[ReplicaStatus]:
    """The replicas with workers as they are now."""
    return [_replica_status(replica) for replica in state.replicas if replica.capacity is None]


def _replica_status(replica: Replica) -> ReplicaStatus:
    pool = replica.pool
    return ReplicaStatus(
        replica=replica.index,
        up=replica.up,
        epoch=replica.epoch,
        num_running=len(replica.running),
        num_steps_in_flight=len(replica.in_flight),
        num_blocks=pool.num_blocks,
        num_held_blocks=pool.num_blocks - pool.num_available,
        num_cached_blocks=len(pool.tree),
    )
