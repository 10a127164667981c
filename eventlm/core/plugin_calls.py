"""Calls into plug-ins, each with what counts instead where one raises or answers nonsense. Every failure is logged."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.core.plugin import ReplicaViews, RequestView, SequenceView, StepLoad
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replicaset import Replicaset
from eventlm.events import PluginFailed

#: Generation of keys that no policy made: they compare with none of any policy.
NO_GENERATION = -1

#: What a plug-in may raise without stopping the engine: anything, an exit of the program too; but not an interrupt.
RAISED = (Exception, SystemExit)


class Keys(NamedTuple):
    """One key for each sequence asked about, and the generation of the policy that made them."""

    keys: list[int]
    generation: int


def ask_policy(state: CoreState, replicaset: Replicaset, views: list[SequenceView]) -> Keys:
    """Keys of the policy in force; else the arrivals."""
    if not views:
        return Keys([], replicaset.policy_generation)
    try:
        # The plug-in cannot change this: keys are matched by position.
        keys = replicaset.policy.keys(tuple(views), state.now_ns)
        if len(keys) == len(views) and set(map(type, keys)) == {int}:
            return Keys(list(keys), replicaset.policy_generation)
        error = f"the policy returned something else than {len(views)} integers"
    except RAISED as raised:
        error = f"the policy raised {type(raised).__name__}"
    state.decide(PluginFailed, error=error, replicaset=replicaset.index)
    return Keys([view.arrival_ns for view in views], NO_GENERATION)


def ask_margin(state: CoreState, replicaset: Replicaset) -> int | None:
    """By how much a key must undercut another to evict it; else never."""
    try:
        margin = replicaset.policy.eviction_margin()
        if margin is None or type(margin) is int:
            return margin
        error = "the policy's margin is neither an integer nor None"
    except RAISED as raised:
        error = f"the policy raised {type(raised).__name__} on its margin"
    state.decide(PluginFailed, error=error, replicaset=replicaset.index)
    return None


def ask_batcher(
    state: CoreState, replicaset: Replicaset, load: StepLoad, view: SequenceView, max_tokens: int, *, idle: bool
) -> int:
    """Tokens of the next chunk; else all of them. None at all is nonsense where it would leave a replica `idle`."""
    try:
        num_tokens = replicaset.plugins.batcher.chunk_tokens(load, view, max_tokens, replicaset.predictor)
        if type(num_tokens) is int and int(idle) <= num_tokens <= max_tokens:
            return num_tokens
        error = f"the batcher answered something else than {int(idle)} to {max_tokens} tokens"
    except RAISED as raised:
        error = f"the batcher raised {type(raised).__name__}"
    state.decide(PluginFailed, error=error, replicaset=replicaset.index)
    return max_tokens


def ask_router(state: CoreState, replicaset: Replicaset, question: RequestView, replicas: ReplicaViews) -> int | None:
    """The index of one of `replicas`, or None for any that has room; else None."""
    try:
        home = replicaset.plugins.router.route(question, replicas)
        if home is None or (type(home) is int and replicaset.is_up(home)):
            return home
        error = "the router answered something else than the index of a replica that is up"
    except RAISED as raised:
        error = f"the router raised {type(raised).__name__}"
    state.decide(PluginFailed, error=error, replicaset=replicaset.index)
    return None
