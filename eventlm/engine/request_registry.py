"""Replies by their public ids: their owners, their requests and the engine's outputs for them.

A resumable reply keeps the engine's outputs, encoded and in the engine's order; a reader counts them. Such a reply has
at most one reader: a newer one takes over. The edge that submitted it is its first reader, number 0. That edge goes on
getting every output after it stops reading, because it owes the engine the ends of the texts.

A reply with an idempotency key may have several readers, who join it. It has the key from its admission until it fails
or its outputs are dropped; while it has it, no other reply of its owner gets it.

A reply whose edge may come back to another engine keeps its outputs in the same way, until its edge leaves it.

A reply that has had no reader for `keep_ns` is forgotten, and its requests are cancelled if they run. A reader reports
that it leaves even when it has read everything, because only the reader can know whether all of it has arrived. A reply
that runs on without a reader waits for one only after its end, and nothing but its owner ends it.

The outputs of all replies together are bounded. Over the bound, the reply that ended first loses its outputs; if none
has ended, the oldest does. Such a reply can still be looked up, and is cancelled as soon as it has no reader.

A search is a reply to which its edge adds requests until it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from eventlm.config import ServerConfig
from eventlm.config.structs import memory_bytes
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence as CoreSequence
from eventlm.core.state.sequence import State
from eventlm.engine.live_requests import LiveRequests, Sink, ignore_output
from eventlm.engine.rate_limits import Charge
from eventlm.engine.request import (
    FinishedOutput,
    IdempotencyKey,
    KeyReusedError,
    KeyTakenError,
    OnOutput,
    Put,
    Request,
    RequestOutput,
    ResumedReply,
    Submission,
    TakenOver,
    UnknownReplyError,
)
from eventlm.engine.spool.loose_edge import LooseEdge
from eventlm.engine.spool.records import KeptReply
from eventlm.errors import EventLMError
from eventlm.metrics.rows import EndedRows, RequestRow
from eventlm.types import NANOSECONDS_PER_SECOND, FinishReason, SequenceId

#: How long replies that run on are kept where streams cannot be resumed.
RUN_ON_SECONDS = 300
#: Replies that can be looked up, resumable or not.
MAX_REPLIES = 16_384
#: Requests of a search that can be looked up: its first and its newest.
MAX_SEARCH_REQUESTS = 4096
#: What the interpreter needs for an output that is kept, beside its bytes, and for a token of a prompt.
_OUTPUT_BYTES = 64
_TOKEN_BYTES = 40
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, RequestOutput]).decode


#: Ends of a sequence after which the same request may run again.
_FAILURES: frozenset[FinishReason] = frozenset({"deadline", "cancelled", "front_end_lost", "error"})

#: preempted: it waits again. ending: its end was seen, its text has yet to be checked.
SampleState = Literal["waiting", "running", "preempted", "ending", "finished"]
_STATES: dict[State, SampleState] = {
    State.WAITING_FOR_GRAMMAR: "waiting",
    State.WAITING: "waiting",
    State.PREFILL: "running",
    State.DECODE: "running",
    State.CLOSING: "ending",
    State.FINISHED: "finished",
}


def sample_state(state: CoreState, sequence: CoreSequence) -> SampleState:
    """Where a sequence of the core is. Between two attempts at other servers it waits."""
    found = _STATES[sequence.state]
    is_own = state.set_of(sequence).forwards is None
    return "preempted" if found == "waiting" and sequence.residency and is_own else found


class SampleStatus(Struct, frozen=True, kw_only=True):
    """A sequence of a reply. row: its metrics once it has ended; None before, and if that was too long ago.

    For a result of a search, request is the first of it, and output_tokens and row are None: its edge has made it.
    """

    request: int
    index: int
    state: SampleState
    output_tokens: int | None
    row: RequestRow | None = None


class ReplyStatus(Struct, frozen=True, kw_only=True):
    """A reply's sequences, in the order of its choices. num_branches: the requests of a search after its first ones."""

    reply_id: str
    samples: list[SampleStatus]
    num_branches: int = 0


class Reply:
    """One reply. `requests` are the seqs of its arrivals, `samples` how many sequences each has; `outputs` are those
    kept, None if none are.

    edge: where the outputs of each request go for its first reader. readers: where they go for each of the present
    readers, by their numbers; None for the edge, which gets them in any case. is_open: whether it is a search that goes
    on. num_branches: see `ReplyStatus`. charge: of a search, to be settled when it is over.
    """

    def __init__(self, submission: Submission, group: Sequence[Request], edge: Sequence[Put]) -> None:
        self.submission = submission
        self.group = group
        self.edge = edge
        self.requests: list[int] = []
        self.outputs: list[bytes] | None = [] if submission.keeps_outputs else None
        self.num_bytes = len(submission.edge_state) + sum(map(_num_bytes, group))
        self.samples = [request.n for request in group]
        self.num_unfinished = sum(self.samples)
        self.readers: dict[int, OnOutput | None] = {0: None}
        self.num_readers = 1
        self.is_open = submission.search_tokens > 0
        self.num_branches = 0
        self.charge: Charge | None = None
        #: How many outputs there were each time that an engine took it over and had perhaps lost some.
        self.rewinds: list[int] = []
        #: Of a reply whose edge may die before it, or come back to another engine.
        self.loose_edge: LooseEdge | None = None
        #: Of a search so far: its prompts and what its requests have produced.
        self._num_tokens = sum(len(each.prompt_token_ids) for each in group)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The seq of each request and its number of samples."""
        return list(zip(self.requests, self.samples, strict=True))

    @property
    def request_key(self) -> tuple[str, str] | None:
        """Further ids by which it can be looked up."""
        submission = self.submission
        return (submission.owner, submission.request_id) if submission.request_id else None

    def forget(self) -> None:
        """Keep only what is needed to look it up: it may stay for long, and prompts are large."""
        self.outputs = None
        self.group = self.edge = ()
        self.submission = structs.replace(self.submission, edge_state=b"")

    def add(self, requests: list[int]) -> None:
        """Add requests of a search, of one sequence each."""
        self.requests += requests
        self.samples += [1] * len(requests)
        self.num_branches += len(requests)
        excess = max(len(self.requests) - MAX_SEARCH_REQUESTS, 0)
        del self.requests[1 : 1 + excess], self.samples[1 : 1 + excess]

    def counting(self, put: Put) -> Put:
        """The sink of a request of a search, which counts what it has produced."""

        def sink(output: RequestOutput | TakenOver | EventLMError) -> None:
            if isinstance(output, FinishedOutput):
                self._num_tokens += output.position
            put(output)

        return sink

    def close(self) -> None:
        """End a search: it takes no more requests. It has used no more than it was charged with."""
        self.is_open = False
        if self.charge is not None:
            self.charge.settle(min(self._num_tokens, self.submission.search_tokens))

    @property
    def is_orphan(self) -> bool:
        """Whether it goes on though its edge has died, and nobody has adopted it."""
        goes_on = self.num_unfinished > 0 and self.submission.is_resumable
        return goes_on and self.loose_edge is not None and self.loose_edge.on_output is None

    def adopt(self, on_output: OnOutput, num_had: int = 0, front_end: int = 0) -> None:
        """Replace the edge that has died. The new one gets all outputs but the first `num_had`."""
        assert self.loose_edge is not None
        assert self.outputs is not None
        for output in self.outputs[num_had:]:
            on_output(*_decode(output))
        self.loose_edge.on_output = on_output
        self.loose_edge.front_end = front_end

    def read_again(self, on_output: OnOutput, num_had: int = 0) -> int:
        """Register a new reader, which has had `num_had` outputs; returns its number. Without a key it takes over."""
        assert self.outputs is not None
        if self.submission.idempotency_key is None:
            self._end_readers()
        reader = self.num_readers
        self.num_readers += 1
        self.readers[reader] = on_output
        for output in self.outputs[num_had:]:
            on_output(*_decode(output))
        return reader

    def _end_readers(self) -> None:
        for on_output in self.readers.values():
            if on_output is None:
                self.edge[0](TakenOver())
                self.edge = ()
            else:
                on_output(0, TakenOver())
        self.readers.clear()


class RequestRegistry:
    """All replies that can be looked up.

    keep_ns: 0 keeps nothing. max_bytes: bound on what all replies keep together. now_ns: the clock. cancel: ends a
    request. wake: asks for a call of `expire` in so many nanoseconds.
    """

    def __init__(
        self,
        *,
        keep_ns: int,
        max_bytes: int,
        now_ns: Callable[[], int],
        cancel: Callable[[int], None],
        wake: Callable[[int], None],
        max_replies: int = MAX_REPLIES,
    ) -> None:
        self._keep_ns = keep_ns
        self._max_bytes = max_bytes
        self._max_replies = max_replies
        self._now_ns = now_ns
        self._cancel = cancel
        self._wake = wake
        #: The oldest first.
        self._replies: dict[str, Reply] = {}
        #: Ids of replies by their owners' ids for the requests.
        self._by_request_id: dict[tuple[str, str], str] = {}
        #: Those that have an idempotency key, by their owners and the digests of the keys.
        self._by_key: dict[tuple[str, bytes], Reply] = {}
        #: Those that keep outputs, oldest first; and those of them that are over, in the order of their ends.
        self._kept: dict[str, Reply] = {}
        self._over: dict[str, Reply] = {}
        #: A call of `expire` is under way.
        self._is_woken = False
        #: When a reply ends unless a reader comes. All wait equally long, so the first in order is due first.
        self._due_ns: dict[str, int] = {}
        #: Those that have not ended, and perhaps some that have.
        self._searches: list[Reply] = []
        self.num_bytes = 0

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        now_ns: Callable[[], int],
        cancel: Callable[[int], None],
        wake: Callable[[int], None],
    ) -> RequestRegistry:
        """A registry with the limits of a server's configuration."""
        return cls(
            # Edges submit streams as resumable only if they can be resumed.
            keep_ns=(config.resume_seconds or RUN_ON_SECONDS) * NANOSECONDS_PER_SECOND,
            max_bytes=memory_bytes(config.resume_memory),
            now_ns=now_ns,
            cancel=cancel,
            wake=wake,
        )

    def sinks(self, reply: Reply) -> list[Put]:
        """The sinks for the engine's outputs of each request: the edge and the kept outputs."""
        edge = list(reply.edge)
        if not self._keep_ns or reply.outputs is None:
            reply.forget()
            return edge
        return [self._sink(reply, index, put) for index, put in enumerate(edge)]

    def begin_search(self, reply: Reply) -> None:
        """From now on its sequences count in `num_searched`, until it is closed."""
        self._searches.append(reply)

    @property
    def num_searched(self) -> int:
        """The most sequences that the open searches have at once."""
        self._searches = [reply for reply in self._searches if reply.is_open]
        return sum(reply.submission.search_sequences for reply in self._searches)

    def search(self, submission: Submission) -> Reply:
        """The search that a further group belongs to. Raises UnknownReplyError if it is over."""
        reply = self._replies.get(submission.reply_id)
        if reply is None or not reply.is_open:
            raise UnknownReplyError(f"the search '{submission.reply_id}' is over")
        return reply

    def add(self, reply: Reply, requests: list[int]) -> None:
        """The reply was admitted; its requests have these seqs."""
        if reply.requests:
            reply.add(requests)
            return
        reply.requests = requests
        submission, reply_id = reply.submission, reply.submission.reply_id
        self._replies[reply_id] = reply
        if reply.request_key is not None:
            self._by_request_id[reply.request_key] = reply_id
        if reply.outputs is not None:
            if (key := submission.idempotency_key) is not None:
                self._by_key[submission.owner, key.digest] = reply
            self._kept[reply_id] = reply
            self._charge(reply, 0)
        if len(self._replies) > self._max_replies:
            self._forget_oldest()

    def keep(self, live: LiveRequests) -> list[KeptReply]:
        """All that another engine needs of the replies that it could go on with: under way, or over and kept."""
        kept = []
        for reply in self._replies.values():
            running = [request for request in reply.requests if request in live]
            if not running and reply.outputs is None:
                continue
            key = reply.submission.idempotency_key
            has_key = key is not None and self._by_key.get((reply.submission.owner, key.digest)) is reply
            kept.append(
                KeptReply(
                    [live.keep(request) for request in running],
                    reply.submission if has_key else structs.replace(reply.submission, idempotency_key=None),
                    list(reply.group),
                    reply.requests,
                    reply.samples,
                    reply.outputs,
                    reply.num_unfinished,
                    reply.num_branches,
                    reply.rewinds,
                )
            )
        return kept

    def restore(self, kept: KeptReply) -> Sequence[Sink]:
        """Take a reply over from another engine; the sinks of its live requests. The reader that it had is still there.
        Nobody waits for a request of no reply.
        """
        submission = kept.submission
        if submission is None:
            return [ignore_output] * len(kept.live)
        edge = LooseEdge()
        reply = Reply(submission, kept.group, edge.puts(len(kept.requests)))
        reply.loose_edge = edge
        # A search has died with its edge.
        reply.close()
        reply.samples, reply.num_unfinished, reply.num_branches = kept.samples, kept.num_unfinished, kept.num_branches
        reply.outputs, reply.rewinds = kept.outputs, kept.rewinds
        sinks = self.sinks(reply)
        reply.num_bytes += sum(len(output) + _OUTPUT_BYTES for output in reply.outputs or ())
        self.add(reply, kept.requests)
        if reply.outputs is not None and not reply.num_unfinished:
            self._over[submission.reply_id] = reply
        of_requests = dict(zip(kept.requests, sinks, strict=True))
        return [of_requests[each.seq] for each in kept.live]

    def rewind(self) -> None:
        """Outputs may have been lost."""
        for reply in self._kept.values():
            assert reply.outputs is not None
            reply.rewinds = [*reply.rewinds, len(reply.outputs)]

    def come_back(self, reply_id: str, on_output: OnOutput, num_had: int, front_end: int, *, is_edge: bool) -> Reply:
        """The edge or a reader of a reply of the engine before is there again, in a front end, and gets all outputs but
        the first `num_had`. A reader gets the newest number. Raises UnknownReplyError if it cannot go on.
        """
        reply = self._kept.get(reply_id)
        if reply is None or reply.outputs is None or num_had > min([len(reply.outputs), *reply.rewinds[-1:]]):
            raise UnknownReplyError(f"the reply '{reply_id}' is no longer kept, or not as far as it was read")
        if not is_edge:
            self._due_ns.pop(reply_id, None)
            reply.read_again(on_output, num_had)
        elif reply.loose_edge is None or reply.loose_edge.on_output is not None:
            raise UnknownReplyError(f"the reply '{reply_id}' has another edge")
        else:
            reply.adopt(on_output, num_had, front_end)
        return reply

    def edges_have_left(self, requests: Iterable[int]) -> list[int]:
        """Give up edges that have not come back to this engine. Returns the requests that no client can resume."""
        lasting = set[int]()
        for reply_id, reply in list(self._kept.items()):
            if reply.loose_edge is not None and reply.loose_edge.on_output is None:
                if reply.submission.is_resumable:
                    lasting.update(reply.requests)
                self.leave(reply_id, 0)
            else:
                lasting.update(reply.requests)
        return [request for request in requests if request not in lasting]

    def edges_have_died(self, front_end: int) -> set[int]:
        """The edges in a front end have died; returns the requests that go on."""
        going_on = set[int]()
        for reply in self._kept.values():
            edge = reply.loose_edge
            if edge is not None and edge.front_end == front_end:
                edge.on_output = None
            if edge is not None and (edge.front_end != front_end or reply.submission.is_resumable):
                going_on.update(reply.requests)
        return going_on

    def orphans(self) -> list[Reply]:
        """Replies under way whose edges have died, and that nobody has adopted."""
        return [reply for reply in self._kept.values() if reply.is_orphan]

    def find(self, reply_id: str, owner: str) -> Reply:
        """The reply with this id, or with a request of this id, if it is this owner's. Raises UnknownReplyError."""
        reply = self._replies.get(reply_id) or self._replies.get(self._by_request_id.get((owner, reply_id), ""))
        if reply is None or reply.submission.owner != owner:
            raise UnknownReplyError(f"there is no reply with the id '{reply_id}', or it is no longer kept")
        return reply

    def replies_named(self, name: str) -> list[Reply]:
        """The reply with this id, else all that have a request of this id, of any owner."""
        reply = self._replies.get(name)
        if reply is not None:
            return [reply]
        return [each for each in self._replies.values() if name and each.submission.request_id == name]

    def reply_of(self, request: int) -> Reply | None:
        """The reply that a request is part of, of any owner."""
        return next((reply for reply in self._replies.values() if request in reply.requests), None)

    def check_key(self, submission: Submission) -> None:
        """Raise KeyTakenError or KeyReusedError if a reply has the submission's key."""
        key = submission.idempotency_key
        if key is not None and self._with_key(key, submission.owner) is not None:
            raise KeyTakenError("a reply to the same request has the key")

    def find_by_key(self, key: IdempotencyKey, owner: str) -> Reply:
        """The reply that has this key. Raises UnknownReplyError, and KeyReusedError if it is to another request."""
        reply = self._with_key(key, owner)
        if reply is None:
            raise UnknownReplyError("no reply has the key")
        return reply

    def _with_key(self, key: IdempotencyKey, owner: str) -> Reply | None:
        reply = self._by_key.get((owner, key.digest))
        if reply is not None and reply.submission.idempotency_key != key:
            raise KeyReusedError("the key belongs to another request")
        return reply

    def _free_key(self, reply: Reply) -> None:
        """Another reply may have its key."""
        submission = reply.submission
        key = submission.idempotency_key
        if key is not None and self._by_key.get((submission.owner, key.digest)) is reply:
            del self._by_key[submission.owner, key.digest]

    def resume(self, reply_id: str, owner: str, on_output: OnOutput) -> ResumedReply:
        """A new reader: gets all outputs from the first on. Raises UnknownReplyError, also if they are not kept.

        It later leaves the reply by the submission's id, even if it was found by another.
        """
        reply = self.find(reply_id, owner)
        if reply.outputs is None or not reply.submission.is_resumable:
            raise UnknownReplyError(f"the reply '{reply_id}' cannot be resumed, or no longer")
        return self.read_again(reply, on_output)

    def read_again(self, reply: Reply, on_output: OnOutput) -> ResumedReply:
        """A new reader of a reply whose outputs are kept."""
        assert reply.outputs is not None
        self._due_ns.pop(reply.submission.reply_id, None)
        return ResumedReply(
            submission=reply.submission,
            group=list(reply.group),
            requests=reply.requests,
            reader=reply.read_again(on_output),
            num_outputs=len(reply.outputs),
            rewinds=reply.rewinds,
        )

    def drop(self, reply: Reply) -> bool:
        """Drop the kept outputs of a resumable reply; False if there were none."""
        was_kept = reply.outputs is not None
        self._drop_outputs(reply.submission.reply_id)
        return was_kept

    def forget(self, reply_id: str) -> None:
        """Drop the kept outputs of a reply that its owner had deleted; nothing if there are none."""
        self._drop_outputs(reply_id)

    def forget_damaged(self, damaged: Iterable[int]) -> set[int]:
        """Drop what is kept of the replies to these requests; all requests of those replies."""
        replies = [reply for request in damaged if (reply := self.reply_of(request)) is not None]
        for reply in replies:
            self._drop_outputs(reply.submission.reply_id)
        return {request for reply in replies for request in reply.requests}

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader has left; nothing if another one has taken over."""
        reply = self._replies.get(reply_id)
        if reply is None or reader not in reply.readers:
            return
        if reply.readers.pop(reader) is None:
            reply.edge = ()
        if reply.readers:
            return
        if reply.outputs is None:
            self._end(reply)
        elif not reply.submission.is_resumable:
            self._drop_outputs(reply_id)
        elif not (reply.submission.runs_on and reply.num_unfinished):
            self._wait(reply_id)

    def expire(self) -> None:
        """End replies that have waited long enough; asks to be called again if some still wait."""
        self._is_woken = False
        now_ns = self._now_ns()
        while self._due_ns:
            reply_id, due_ns = next(iter(self._due_ns.items()))
            if due_ns > now_ns:
                self._ask_for_wake(due_ns - now_ns)
                return
            self._drop_outputs(reply_id)

    def _ask_for_wake(self, delay_ns: int) -> None:
        """Ask for one call of `expire`. No later reply is due earlier, so one is enough."""
        if not self._is_woken:
            self._is_woken = True
            self._wake(delay_ns)

    def _forget_oldest(self) -> None:
        """Forget the oldest replies over the bound, except running ones, which a leaving reader may still cancel."""
        for reply_id, reply in self._replies.items():
            is_kept = self._keep_ns and reply.submission.keeps_outputs and reply.num_unfinished
            if not is_kept and not reply.is_open:
                self._drop_outputs(reply_id)
                del self._replies[reply_id]
                if reply.request_key is not None and self._by_request_id.get(reply.request_key) == reply_id:
                    del self._by_request_id[reply.request_key]
                return

    def _sink(self, reply: Reply, index: int, put: Put) -> Put:
        def sink(output: RequestOutput | TakenOver | EventLMError) -> None:
            if isinstance(output, EventLMError):
                reply.num_unfinished = 0
                self._drop_outputs(reply.submission.reply_id)
            else:
                self._keep(reply, index, output)
            put(output)
            for on_output in reply.readers.values():
                if on_output is not None:
                    on_output(index, output)

        return sink

    def _keep(self, reply: Reply, index: int, output: RequestOutput | TakenOver) -> None:
        if isinstance(output, FinishedOutput):
            reply.num_unfinished -= 1
            if output.reason in _FAILURES:
                self._free_key(reply)
        if reply.outputs is None:
            return
        encoded = _encode((index, output))
        reply.outputs.append(encoded)
        if not reply.num_unfinished:
            self._over[reply.submission.reply_id] = reply
            if reply.submission.runs_on and not reply.readers:
                self._wait(reply.submission.reply_id)
        self._charge(reply, len(encoded) + _OUTPUT_BYTES)

    def _charge(self, reply: Reply, num_bytes: int) -> None:
        """Count what a reply keeps, all of it when it is new, and make room for it."""
        self.num_bytes += num_bytes or reply.num_bytes
        reply.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_outputs(next(iter(self._over or self._kept)))

    def _wait(self, reply_id: str) -> None:
        """From now on a new reader has `keep_ns` to arrive."""
        self._due_ns.pop(reply_id, None)
        self._due_ns[reply_id] = self._now_ns() + self._keep_ns
        self._ask_for_wake(self._keep_ns)

    def _drop_outputs(self, reply_id: str) -> None:
        """Drop the kept outputs of a reply; without a reader it has no purpose."""
        reply = self._kept.pop(reply_id, None)
        if reply is None:
            return
        self._over.pop(reply_id, None)
        self._due_ns.pop(reply_id, None)
        self._free_key(reply)
        self.num_bytes -= reply.num_bytes
        reply.forget()
        if not reply.readers:
            self._end(reply)

    def _end(self, reply: Reply) -> None:
        reply.close()
        if reply.num_unfinished and not reply.submission.runs_on:
            for request in reply.requests:
                self._cancel(request)


def _num_bytes(request: Request) -> int:
    """About what a kept request takes."""
    forwarded = request.forwarded
    return _TOKEN_BYTES * len(request.prompt_token_ids) + (0 if forwarded is None else len(forwarded.body))


def reply_status(reply: Reply, state: CoreState | None, rows: EndedRows) -> ReplyStatus:
    """`state` None: the engine no longer runs."""
    submission = reply.submission
    samples = [sample for seq, n in reply.sequences for sample in _samples(seq, n, state, rows)]
    if submission.search_choices:
        found = _search_state(samples) if reply.is_open else "finished"
        samples = [
            SampleStatus(request=reply.requests[0], index=index, state=found, output_tokens=None)
            for index in range(submission.search_choices)
        ]
    return ReplyStatus(reply_id=submission.reply_id, samples=samples, num_branches=reply.num_branches)


def _search_state(samples: Sequence[SampleStatus]) -> SampleState:
    """Where a search is that goes on. Between two requests it runs."""
    states = {sample.state for sample in samples}
    found: tuple[SampleState, ...] = ("running", "preempted", "waiting")
    return next((state for state in found if state in states), "running")


def _samples(seq: int, n: int, state: CoreState | None, rows: EndedRows) -> Iterator[SampleStatus]:
    live = state.requests.get(seq) if state is not None else None
    for index in range(n):
        row = rows.find(SequenceId(seq, index))
        found: SampleState = "finished"
        output_tokens = row.output_tokens if row is not None else 0
        if state is not None and live is not None and row is None:
            sequence = live.sequences[index]
            found, output_tokens = sample_state(state, sequence), sequence.num_output_tokens
        yield SampleStatus(request=seq, index=index, state=found, output_tokens=output_tokens, row=row)
