"""Decisions: what the core concluded. A replay computes each again and compares it byte for byte."""

from __future__ import annotations

from typing import Literal

from eventlm.events.base import Decision
from eventlm.types import FinishReason

RejectReason = Literal["queue_full", "context_length"]
PreemptReason = Literal["memory", "admission", "lost"]


class Admitted(Decision, frozen=True, kw_only=True, tag="admit"):
    """The request enters the queue. (Its admission to a replica is part of a launch.)"""

    request: int


class Rejected(Decision, frozen=True, kw_only=True, tag="reject"):
    """The request is turned away, and the core keeps nothing of it."""

    request: int
    reason: RejectReason


class Routed(Decision, frozen=True, kw_only=True, tag="route"):
    """A sequence is assigned to a replica; with index -1, all of the request's sequences that had none."""

    request: int
    index: int = -1
    replica: int


class Launched(Decision, frozen=True, kw_only=True, tag="launch"):
    """One step of one replica: everything that its worker needs, except the token ids, which are sent with it.

    decodes: (request, index, confirmed tokens of the sequence, steps of it already in flight), most urgent first.
    chunks: (request, index, position of the first token, tokens, 1 if the row samples), after the decodes.
    most: for each row the most tokens it may produce; empty where every sampling row may produce one.
    blocks: (row, index in the block table, block numbers to write there).
    forget: (request, index) that the worker must drop before it computes anything of this step.
    bucket: rows of the graph that the step runs as, padded, where the worker has captured any; 0: as no graph.
    states: (row, slot, source, copies) of a model with recurrent layers. slot: the sequence's own, the same as long as
    it is resident. source: the slot whose state the row starts from; -1: none, it begins from zero. copies:
    (position, slot) to copy the state to once it covers so many leading tokens of the sequence, which the row computes.
    Rows without an entry go on in their slot. As far as states are concerned rows run in order, and a row reads its
    source before it keeps a copy.
    loads: of several KV groups, the tokens that each computes.
    """

    replica: int
    epoch: int
    step: int
    decodes: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int, int, int]] = []
    most: list[int] = []
    blocks: list[tuple[int, int, list[int]]] = []
    forget: list[tuple[int, int]] = []
    num_tokens: int
    predicted_ns: int
    bucket: int = 0
    states: list[tuple[int, int, int, list[tuple[int, int]]]] = []
    loads: list[int] = []


class Preempted(Decision, frozen=True, kw_only=True, tag="preempt"):
    """A running sequence loses its blocks and waits again. Its emitted tokens stay."""

    request: int
    index: int
    replica: int
    reason: PreemptReason
    by: tuple[int, int] | None = None


class Emitted(Decision, frozen=True, kw_only=True, tag="emit"):
    """The tokens of a completed step may be shown: those that the completion reports, except `dropped`.

    dropped: (row, tokens) of rows whose sequence had ended, was closing, or had no room for all of them.
    """

    replica: int
    step: int
    num_tokens: int
    dropped: list[tuple[int, int]] = []


class Closing(Decision, frozen=True, kw_only=True, tag="closing"):
    """First phase of a finish: an end was found at `position`, and a `text_end` fact is due."""

    request: int
    index: int
    reason: FinishReason
    position: int


class Finished(Decision, frozen=True, kw_only=True, tag="finish"):
    """A sequence ends, with `position` output tokens."""

    request: int
    index: int
    reason: FinishReason
    position: int
    cached_tokens: int = 0


class TimerSet(Decision, frozen=True, kw_only=True, tag="set_timer"):
    """A `timer` fact is due once the clock has passed `due_ns`."""

    request: int
    due_ns: int


class PluginFailed(Decision, frozen=True, kw_only=True, tag="plugin_failed"):
    """A plug-in raised or returned nonsense. Instead: order of arrival, no eviction, whole chunk, shared queue."""

    error: str
    #: Whose plug-in.
    replicaset: int = 0
