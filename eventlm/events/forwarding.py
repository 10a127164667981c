"""Facts and decisions of replicas that are other servers, and have no steps. An attempt is one request to one of them
for one sequence; attempts of a sequence are numbered from 1.
"""

from __future__ import annotations

from typing import Literal

from eventlm.events.base import Decision, Fact
from eventlm.types import FinishReason

#: Why an attempt failed. `connect`: no connection. `timeout`: the backend fell silent. `broken`: its answer ended too
#: early. `overloaded`: it takes no more at present. `server`: it failed. `refused`: it does not take this request, and
#: no other would. `protocol`: this is no answer of OpenAI's API.
FailureKind = Literal["connect", "timeout", "broken", "overloaded", "server", "refused", "protocol"]

#: Why a backend gets nothing more though it answers: an operator wants it so, for the present or for good.
DRAINED, REMOVED = "drained", "removed"


class BackendUp(Fact, frozen=True, kw_only=True, tag="backend_up"):
    """A backend takes requests. Its epoch is larger than those before it of the replica.

    name: its address. kind: which server it is. max_concurrency: most requests that it may have at once; 0: the core
    finds out.
    """

    replica: int
    epoch: int
    name: str
    kind: str = ""
    max_concurrency: int = 0
    weight_ppm: int = 1_000_000


class BackendDown(Fact, frozen=True, kw_only=True, tag="backend_down"):
    """A backend gets no further requests: it failed too often in a row, is drained or was removed. What it has goes on.

    The end of an older epoch is a no-op.
    """

    replica: int
    epoch: int
    reason: str


class BackendState(Fact, frozen=True, kw_only=True, tag="backend_state"):
    """What a backend's own metrics say: requests that it runs, those that wait there, and used KV cache in millionths;
    -1: it does not say.
    """

    replica: int
    epoch: int
    running: int = -1
    waiting: int = -1
    kv_used_ppm: int = -1


class Streamed(Fact, frozen=True, kw_only=True, tag="streamed"):
    """Answers went on. rows: (request, index, attempt, output tokens of the sequence so far), each sequence once."""

    rows: list[tuple[int, int, int, int]]


class ForwardEnded(Fact, frozen=True, kw_only=True, tag="forward_ended"):
    """An answer is complete, with so many output tokens. prompt_tokens and cached_tokens are the backend's own count of
    the prompt; -1: it does not say.
    """

    request: int
    index: int
    attempt: int
    reason: FinishReason
    num_tokens: int
    prompt_tokens: int = -1
    cached_tokens: int = -1


class ForwardFailed(Fact, frozen=True, kw_only=True, tag="forward_failed"):
    """An attempt has failed. status: of HTTP, 0 if there was none. retry_after_ns: how long the backend wants us to
    wait. can_continue: whether another attempt can go on from the tokens that were shown.
    """

    request: int
    index: int
    attempt: int
    kind: FailureKind
    status: int = 0
    retry_after_ns: int = 0
    can_continue: bool = False


class Forwarded(Decision, frozen=True, kw_only=True, tag="forward"):
    """A sequence is sent to a backend. cached_tokens: how much of its prompt the backend's cache is taken to hold.
    running: how many the backend has with it; limit: how many it may have. hedge: the sequence has another attempt
    under way, and the first of them to answer counts.
    """

    request: int
    index: int
    replica: int
    attempt: int
    cached_tokens: int = 0
    running: int
    limit: int
    hedge: bool = False


class Relayed(Decision, frozen=True, kw_only=True, tag="relay"):
    """What a `streamed` fact brought may be shown, except its rows `dropped`, whose attempts do not count any more."""

    num_tokens: int
    dropped: list[int] = []


class RetrySet(Decision, frozen=True, kw_only=True, tag="retry"):
    """Attempt `attempt` has failed, or is lost with its engine. The sequence may be sent again from `due_ns` on."""

    request: int
    index: int
    replica: int
    attempt: int
    due_ns: int


class Withdrawn(Decision, frozen=True, kw_only=True, tag="withdraw"):
    """An attempt is ended: another one of the sequence has answered first."""

    request: int
    index: int
    replica: int
    attempt: int
