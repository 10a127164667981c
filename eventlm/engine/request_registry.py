"""Replies by their public ids: whose they are, which requests they are made of, and what the engine said of them.

A reply that is resumable keeps the engine's outputs, encoded, in the order in which the engine gave them; the number
of outputs is what a reader counts by. Such a reply has at most one reader: a newer one takes over. The edge that
submitted it is its first reader, number 0. It goes on to get every output when it reads no longer, for it owes the
engine the ends of the texts.

A reply that has had no reader for `keep_ns` is forgotten, and its requests are cancelled if they run. Who reads says
when it leaves, also when it has read everything: nobody else knows whether all of that has arrived.

What is kept has a bound: over it the reply that was over first loses its outputs, and where none is over the oldest.
A reply whose outputs are lost can still be looked up, and is cancelled at once when nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from eventlm.config.server import ServerConfig
from eventlm.config.sizes import memory_bytes
from eventlm.engine.request import (
    FinishedOutput,
    OnOutput,
    Put,
    Request,
    RequestOutput,
    ResumedReply,
    Submission,
    TakenOver,
    UnknownReplyError,
)
from eventlm.errors import EventLMError
from eventlm.types import NANOSECONDS_PER_SECOND

#: Replies that can be looked up, resumable or not.
MAX_REPLIES = 16_384
#: What the interpreter needs for an output that is kept, beside its bytes, and for a token of a prompt.
_OUTPUT_BYTES = 64
_TOKEN_BYTES = 40
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, RequestOutput]).decode


class Reply:
    """One reply. `requests` are the seqs of its arrivals, `samples` how many sequences each has; `outputs` is what is
    kept of it, None if nothing is.

    edge: where the outputs of each request go, for its first reader. reader: the number of who reads, None if nobody
    does; `on_output` is where the outputs go besides if that is not the edge.
    """

    def __init__(self, submission: Submission, group: Sequence[Request], edge: Sequence[Put]) -> None:
        self.submission = submission
        self.group = group
        self.edge = edge
        self.requests: list[int] = []
        self.outputs: list[bytes] | None = [] if submission.is_resumable else None
        self.num_bytes = len(submission.edge_state) + _TOKEN_BYTES * sum(len(each.prompt_token_ids) for each in group)
        self.samples = [request.n for request in group]
        self.num_unfinished = sum(self.samples)
        self.reader: int | None = 0
        self.num_readers = 1
        self.on_output: OnOutput | None = None

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Of each request its seq and how many samples it has."""
        return list(zip(self.requests, self.samples, strict=True))

    @property
    def request_key(self) -> tuple[str, str] | None:
        """By which it can be looked up beside its own id."""
        submission = self.submission
        return (submission.owner, submission.request_id) if submission.request_id else None

    def forget(self) -> None:
        """Keep no more than what it can be looked up by: it may stay for long, and prompts are large."""
        self.outputs = None
        self.group = self.edge = ()
        self.submission = structs.replace(self.submission, edge_state=b"")

    def take_over(self, on_output: OnOutput) -> int:
        """A new reader, which has had nothing yet; its number."""
        assert self.outputs is not None
        if self.reader == 0:
            self.edge[0](TakenOver())
            self.edge = ()
        elif self.on_output is not None:
            self.on_output(0, TakenOver())
        self.reader = self.num_readers
        self.num_readers += 1
        self.on_output = on_output
        for output in self.outputs:
            on_output(*_decode(output))
        return self.reader


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
        #: Those that keep outputs, the oldest first; and of those the ones that are over, in the order of their ends.
        self._kept: dict[str, Reply] = {}
        self._over: dict[str, Reply] = {}
        #: A call of `expire` is under way.
        self._is_woken = False
        #: When a reply ends unless a reader comes. All wait equally long, so the first in order is due first.
        self._due_ns: dict[str, int] = {}
        self.num_bytes = 0

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        now_ns: Callable[[], int],
        cancel: Callable[[int], None],
        wake: Callable[[int], None],
    ) -> RequestRegistry:
        """One that keeps what a server is told to keep."""
        return cls(
            keep_ns=config.resume_seconds * NANOSECONDS_PER_SECOND,
            max_bytes=memory_bytes(config.resume_memory),
            now_ns=now_ns,
            cancel=cancel,
            wake=wake,
        )

    def sinks(self, reply: Reply) -> list[Put]:
        """Where the engine's outputs of each request must go: to the edge, and to what is kept."""
        edge = list(reply.edge)
        if not self._keep_ns or reply.outputs is None:
            reply.forget()
            return edge
        return [self._sink(reply, place, put) for place, put in enumerate(edge)]

    def add(self, reply: Reply, requests: list[int]) -> None:
        """The reply was admitted, its requests have these seqs."""
        reply.requests = requests
        reply_id = reply.submission.reply_id
        self._replies[reply_id] = reply
        if reply.request_key is not None:
            self._by_request_id[reply.request_key] = reply_id
        if reply.outputs is not None:
            self._kept[reply_id] = reply
            self._charge(reply, 0)
        if len(self._replies) > self._max_replies:
            self._forget_oldest()

    def find(self, reply_id: str, owner: str) -> Reply:
        """The reply of this id, or of a request with it, if it is this owner's. Raises UnknownReplyError."""
        reply = self._replies.get(reply_id) or self._replies.get(self._by_request_id.get((owner, reply_id), ""))
        if reply is None or reply.submission.owner != owner:
            raise UnknownReplyError(f"there is no reply with the id '{reply_id}', or not any more")
        return reply

    def replies_named(self, name: str) -> list[Reply]:
        """The reply of this id, else all of requests with it, whoever they belong to."""
        reply = self._replies.get(name)
        if reply is not None:
            return [reply]
        return [each for each in self._replies.values() if name and each.submission.request_id == name]

    def reply_of(self, request: int) -> Reply | None:
        """The reply that a request is a part of, whoever it belongs to."""
        return next((reply for reply in self._replies.values() if request in reply.requests), None)

    def resume(self, reply_id: str, owner: str, on_output: OnOutput) -> ResumedReply:
        """A new reader: gets all outputs from the first on. Raises UnknownReplyError, also if they are not kept.

        What it is to leave is the reply of the submission's id, also if it was found by another.
        """
        reply = self.find(reply_id, owner)
        if reply.outputs is None:
            raise UnknownReplyError(f"the reply '{reply_id}' cannot be resumed, or not any more")
        self._due_ns.pop(reply.submission.reply_id, None)
        return ResumedReply(
            submission=reply.submission,
            group=list(reply.group),
            requests=reply.requests,
            reader=reply.take_over(on_output),
            num_outputs=len(reply.outputs),
        )

    def drop(self, reply: Reply) -> bool:
        """Keep nothing of a reply that can be resumed any more; False if nothing was kept."""
        was_kept = reply.outputs is not None
        self._drop_outputs(reply.submission.reply_id)
        return was_kept

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader reads no longer; nothing if another one has taken over."""
        reply = self._replies.get(reply_id)
        if reply is None or reply.reader != reader:
            return
        reply.reader = reply.on_output = None
        reply.edge = ()
        if reply.outputs is not None:
            self._wait(reply_id)
        else:
            self._end(reply)

    def expire(self) -> None:
        """End what has waited long enough; asks to be called again if something still waits."""
        self._is_woken = False
        now_ns = self._now_ns()
        while self._due_ns:
            reply_id, due_ns = next(iter(self._due_ns.items()))
            if due_ns > now_ns:
                self._ask_for_wake(due_ns - now_ns)
                return
            self._drop_outputs(reply_id)

    def _ask_for_wake(self, delay_ns: int) -> None:
        """One is enough: nothing is due before what was first when it was asked for."""
        if not self._is_woken:
            self._is_woken = True
            self._wake(delay_ns)

    def _forget_oldest(self) -> None:
        """But none that may yet have to be cancelled when its reader leaves: those are as many as run at most."""
        for reply_id, reply in self._replies.items():
            if not (self._keep_ns and reply.submission.is_resumable and reply.num_unfinished):
                self._drop_outputs(reply_id)
                del self._replies[reply_id]
                if reply.request_key is not None and self._by_request_id.get(reply.request_key) == reply_id:
                    del self._by_request_id[reply.request_key]
                return

    def _sink(self, reply: Reply, place: int, put: Put) -> Put:
        def sink(output: RequestOutput | TakenOver | EventLMError) -> None:
            if isinstance(output, EventLMError):
                reply.num_unfinished = 0
                self._drop_outputs(reply.submission.reply_id)
            else:
                self._keep(reply, place, output)
            put(output)
            if reply.on_output is not None:
                reply.on_output(place, output)

        return sink

    def _keep(self, reply: Reply, place: int, output: RequestOutput | TakenOver) -> None:
        if isinstance(output, FinishedOutput):
            reply.num_unfinished -= 1
        if reply.outputs is None:
            return
        encoded = _encode((place, output))
        reply.outputs.append(encoded)
        if not reply.num_unfinished:
            self._over[reply.submission.reply_id] = reply
        self._charge(reply, len(encoded) + _OUTPUT_BYTES)

    def _charge(self, reply: Reply, num_bytes: int) -> None:
        """Count what a reply keeps, all of it when it is new, and make room for it."""
        self.num_bytes += num_bytes or reply.num_bytes
        reply.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_outputs(next(iter(self._over or self._kept)))

    def _wait(self, reply_id: str) -> None:
        """From now on a reader has `keep_ns` to come."""
        self._due_ns.pop(reply_id, None)
        self._due_ns[reply_id] = self._now_ns() + self._keep_ns
        self._ask_for_wake(self._keep_ns)

    def _drop_outputs(self, reply_id: str) -> None:
        """Keep nothing of a reply any more; without a reader it has no purpose."""
        reply = self._kept.pop(reply_id, None)
        if reply is None:
            return
        self._over.pop(reply_id, None)
        self._due_ns.pop(reply_id, None)
        self.num_bytes -= reply.num_bytes
        reply.forget()
        if reply.reader is None:
            self._end(reply)

    def _end(self, reply: Reply) -> None:
        if reply.num_unfinished:
            for request in reply.requests:
                self._cancel(request)
