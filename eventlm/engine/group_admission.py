"""One group of requests from its arrival to the decision: its sinks, its cost and the caller that waits for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import structs

from eventlm.config import CacheConfig, CoreConfig
from eventlm.engine.rate_limits import Charge, RateLimiter
from eventlm.engine.request import (
    ContextLengthError,
    EngineUnavailableError,
    FinishedOutput,
    OnOutput,
    Put,
    QueueFullError,
    Request,
    RequestHandle,
    RequestOutput,
    Submission,
    TakenOver,
)
from eventlm.engine.request_check import most_sequences
from eventlm.engine.request_registry import Reply, RequestRegistry
from eventlm.engine.spool.loose_edge import LooseEdge
from eventlm.errors import EventLMError
from eventlm.events.decisions import RejectReason

QUEUE_FULL = "the queue is full: no room for the request now, try again later"


class AdmissionParts(NamedTuple):
    """The parts of the engine that an admission uses. `watch_grammar` gets the seq of a request without its grammar,
    `note_caller` the `traceparent` of requests and their seqs.
    """

    registry: RequestRegistry
    limiter: RateLimiter
    end_text: Callable[[int, int, int, str], None]
    cancel: Callable[[int, str], None]
    watch_grammar: Callable[[int], None]
    note_caller: Callable[[str, list[int]], None]


class Admission:
    """A group that arrives. The engine sends the outputs of its requests to `sinks`; the submitter has `handles`.

    Raises RateLimitError for a submission over its limits, and UnknownReplyError for one to a search that is over.
    """

    def __init__(
        self,
        parts: AdmissionParts,
        group: Sequence[Request],
        submission: Submission | None,
        on_output: OnOutput | None,
        now_ns: int,
    ) -> None:
        self._parts = parts
        self._group = group
        self._submission = submission
        self.handles = [
            RequestHandle(
                -1, request.n, parts.end_text, parts.cancel, put=on_output and functools.partial(on_output, index)
            )
            for index, request in enumerate(group)
        ]
        self.sinks: list[Put] = [handle.put for handle in self.handles]
        self._traceparent = submission.traceparent if submission is not None else ""
        self._charge = charge_for(parts.limiter, submission, group, now_ns) if submission is not None else None
        self._reply = None
        if submission is not None:
            self._reply, self.sinks = reply_with_sinks(parts.registry, submission, group, self.sinks, self._charge)
        if self._charge is not None:
            self.handles[0].rate_limits = self._charge.state
        self._decision: asyncio.Future[RejectReason | None] = asyncio.get_running_loop().create_future()

    def decide(self, reason: RejectReason | None, seqs: list[int]) -> None:
        """The engine's decision: None, or why the group is not admitted; and the seqs of its requests.

        If that raises, so does `wait`.
        """
        try:
            self._decide(reason, seqs)
        except Exception:
            self.fail(EngineUnavailableError("the engine could not take the request; see the server's log"))
            raise

    def _decide(self, reason: RejectReason | None, seqs: list[int]) -> None:
        parts = self._parts
        if self._traceparent:
            parts.note_caller(self._traceparent, seqs)
        if self._reply is not None and reason is None:
            parts.registry.add(self._reply, seqs)
        if reason is not None:
            if self._charge is not None:
                self._charge.refund()
            if self._reply is not None:
                # A search holds its room from its submission on.
                self._reply.is_open = False
        for handle, seq, request in zip(self.handles, seqs, self._group, strict=True):
            handle.request = seq
            if request.scheduling.waits_for_grammar and reason is None:
                parts.watch_grammar(seq)
        if self._decision.cancelled() and reason is None:
            self._abandon()
        if not self._decision.done():
            self._decision.set_result(reason)

    def fail(self, error: EngineUnavailableError) -> None:
        """The engine is dead: there will be no decision."""
        if not self._decision.done():
            self._decision.set_exception(error)

    def has_key_of(self, submission: Submission) -> bool:
        """Whether this is for the same idempotency key."""
        own = self._submission
        if own is None or own.idempotency_key is None or submission.idempotency_key is None:
            return False
        return own.owner == submission.owner and own.idempotency_key.digest == submission.idempotency_key.digest

    async def decided(self) -> None:
        """Until there is a decision, or the submitter no longer waits for one."""
        await asyncio.wait([self._decision])

    async def wait(self, max_model_len: int) -> None:
        """Until the group is admitted. Raises QueueFullError, ContextLengthError or EngineUnavailableError.

        A caller that is cancelled meanwhile leaves no request behind.
        """
        try:
            reason = await self._decision
        except asyncio.CancelledError:
            # The decision may have come just before.
            self._abandon()
            raise
        if reason == "queue_full":
            raise QueueFullError(QUEUE_FULL)
        if reason is not None:
            raise ContextLengthError(f"a prompt and its max_tokens exceed the context of {max_model_len} tokens")

    def _abandon(self) -> None:
        """The caller no longer waits, nor reads the reply."""
        if self._reply is not None:
            self._parts.registry.leave(self._reply.submission.reply_id, 0)
        for handle in self.handles:
            handle.cancel()


def check_room_to_search(submission: Submission, core: CoreConfig, num_taken: int) -> None:
    """Raise QueueFullError unless the sequences of a new search fit beside those in the queue and in other searches.

    The core admits the search's first requests, and afterwards takes what the search adds without asking for room.
    """
    if num_taken + submission.search_sequences > most_sequences(core):
        raise QueueFullError(QUEUE_FULL)


def with_cache_rules(group: Sequence[Request], submission: Submission | None, cache: CacheConfig) -> Sequence[Request]:
    """Whether the requests read the prefix cache, and under which salt."""
    if not cache.prefix_cache:
        return [request.with_scheduling(skip_cache_read=True) for request in group]
    if cache.isolate_prefix_cache == "key" and submission is not None:
        # An owner is hexadecimal, so no salt can make one owner look like another.
        return [structs.replace(request, cache_salt=f"{submission.owner}/{request.cache_salt}") for request in group]
    return group


def reply_with_sinks(
    registry: RequestRegistry,
    submission: Submission,
    group: Sequence[Request],
    edge: Sequence[Put],
    charge: Charge | None,
) -> tuple[Reply, list[Put]]:
    """The reply that a group makes or, in a search, adds to; and the sinks of its requests before those of the edge.

    Raises UnknownReplyError if the search is over.
    """
    if submission.goes_on:
        reply = registry.search(submission)
        return reply, [reply.counting(put) for put in edge]
    loose = None
    if submission.edge_returns:
        puts = edge
        loose = LooseEdge(lambda index, output: puts[index](output), group[0].scheduling.front_end)
        edge = loose.puts(len(group))
    reply = Reply(submission, group, edge)
    reply.loose_edge = loose
    sinks = registry.sinks(reply)
    if submission.search_tokens:
        registry.begin_search(reply)
        reply.charge = charge
        return reply, [reply.counting(put) for put in sinks]
    return reply, sinks if charge is None else metered(charge, group, sinks)


def charge_for(limiter: RateLimiter, submission: Submission, group: Sequence[Request], now_ns: int) -> Charge | None:
    """Charge the group as one request, with all prompts and the most tokens it may produce; None without limits, and
    for a search that goes on.

    Raises RateLimitError.
    """
    if not submission.limits or submission.goes_on:
        return None
    num_tokens = submission.search_tokens or sum(
        len(each.prompt_token_ids) + each.n * each.max_tokens for each in group
    )
    classes = [each.scheduling.service_class for each in group]
    account = submission.account or submission.owner
    return limiter.charge(account, submission.limits, num_tokens, now_ns, classes=classes)


def metered(charge: Charge, group: Sequence[Request], sinks: Sequence[Put]) -> list[Put]:
    """The sinks of the group's requests, which settle the charge when the last sequence is over."""
    num_unfinished = sum(request.n for request in group)
    num_tokens = sum(len(request.prompt_token_ids) for request in group)

    def meter(put: Put) -> Put:
        def sink(output: RequestOutput | TakenOver | EventLMError) -> None:
            nonlocal num_unfinished, num_tokens
            if isinstance(output, EventLMError):
                charge.settle(num_tokens)
            elif isinstance(output, FinishedOutput):
                num_unfinished -= 1
                num_tokens += output.position
                if not num_unfinished:
                    charge.settle(num_tokens)
            put(output)

        return sink

    return [meter(put) for put in sinks]
