"""Where the outputs of a front end's calls go, and what another engine must know of them to let them go on."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from eventlm.engine.request import (
    EngineUnavailableError,
    FinishedOutput,
    OnOutput,
    RequestHandle,
    Submission,
    TakenOver,
)
from eventlm.frontend.protocol import (
    CancelRequest,
    EndText,
    LeaveReply,
    Lost,
    Notification,
    Outputs,
    ReturnedStream,
    ReturningStream,
)


class CallStream:
    """Where a call's outputs go. `num_left`: the unfinished sequences of each of its requests.

    reply_id: of a stream that can go on with another engine. num_had: its outputs so far. submission: of an edge, with
    its handles; has_left: whether it is a reader no more. reader: the present number of a reader that is no edge. told:
    what the engine was told of the requests.
    """

    __slots__ = ("handles", "has_left", "num_had", "num_left", "on_output", "reader", "reply_id", "submission", "told")

    def __init__(self, on_output: OnOutput, num_left: list[int], handles: Sequence[RequestHandle] = ()) -> None:
        self.on_output = on_output
        self.num_left = num_left
        self.handles = handles
        self.reply_id = ""
        self.num_had = 0
        self.submission: Submission | None = None
        self.has_left = False
        self.reader = 0
        self.told: list[EndText | CancelRequest] = []

    def returns(self, submission: Submission) -> None:
        """It is the edge of a reply, and goes on with the next engine."""
        self.submission = submission
        self.reply_id = submission.reply_id

    def fail(self, error: EngineUnavailableError) -> None:
        """End it with an error."""
        for index, num_left in enumerate(self.num_left or [1]):
            if num_left:
                self.on_output(index, error)


class CallStreams:
    """All streams, by the numbers of their calls. send: tells the engine something."""

    def __init__(self, send: Callable[[Notification], None]) -> None:
        self._send = send
        self._streams: dict[int, CallStream] = {}
        #: The streams of resumed replies, by reply id and reader number.
        self._reading: dict[tuple[str, int], CallStream] = {}
        #: Of edges that can go on with another engine: by their reply ids, and by the seqs of their requests.
        self._edges: dict[str, CallStream] = {}
        self._edges_of: dict[int, CallStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, call: int) -> bool:
        return call in self._streams

    @property
    def num_readers(self) -> int:
        """How many read a resumed reply."""
        return len(self._reading)

    @property
    def num_edges(self) -> int:
        """How many can go on as edges, or are noted as such."""
        return max(len(self._edges), len(self._edges_of))

    def add(self, call: int, stream: CallStream) -> None:
        """The stream of a call that is made."""
        self._streams[call] = stream
        if stream.submission is not None:
            self._edges[stream.reply_id] = stream

    def forget(self, call: int) -> CallStream | None:
        """The stream of a call has no more outputs."""
        stream = self._streams.pop(call, None)
        if stream is not None and stream.submission is not None:
            self._edges.pop(stream.reply_id, None)
            for handle in stream.handles:
                self._edges_of.pop(handle.request, None)
        return stream

    def is_edge(self, call: int) -> bool:
        """Whether the stream of a call goes on as an edge."""
        stream = self._streams.get(call)
        return stream is not None and stream.submission is not None

    def note_seqs(self, stream: CallStream, requests: list[int]) -> None:
        """The seqs of a stream's requests."""
        for handle, seq in zip(stream.handles, requests, strict=True):
            handle.request = seq
            if stream.submission is not None and any(stream.num_left):
                self._edges_of[seq] = stream

    def note_reader(self, stream: CallStream, reply_id: str, reader: int) -> None:
        """The stream reads a resumed reply, until it leaves."""
        self._reading[reply_id, reader] = stream
        stream.reply_id, stream.reader = reply_id, reader

    def leave(self, reply_id: str, reader: int) -> int:
        """A reader leaves; returns its present number."""
        stream = self._reading.pop((reply_id, reader), None)
        if stream is not None:
            self._streams = {call: each for call, each in self._streams.items() if each is not stream}
            return stream.reader
        if reply_id in self._edges:
            self._edges[reply_id].has_left = True
        return reader

    def tell(self, message: EndText | CancelRequest) -> None:
        """Tell the engine something of a request. The next one must know it, too."""
        if message.request in self._edges_of:
            self._edges_of[message.request].told.append(message)
        self._send(message)

    def take(self, outputs: Outputs) -> None:
        """Pass outputs on."""
        for call, index, output in outputs.items:
            stream = self._streams.get(call)
            if stream is None:
                continue
            if isinstance(output, Lost):
                self._count_off(call, stream, index, all_at_once=True)
                stream.on_output(index, EngineUnavailableError(output.message))
                continue
            if not isinstance(output, TakenOver):
                stream.num_had += 1
            stream.on_output(index, output)
            if isinstance(output, FinishedOutput):
                self._count_off(call, stream, index)

    def _count_off(self, call: int, stream: CallStream, index: int, *, all_at_once: bool = False) -> None:
        if stream.num_left:
            stream.num_left[index] -= stream.num_left[index] if all_at_once else 1
            if not any(stream.num_left):
                self.forget(call)
                if stream.submission is not None and not stream.submission.is_resumable:
                    # No other engine need have it.
                    self._send(LeaveReply(stream.reply_id, 0))

    def pause(self, calls: Container[int], error: EngineUnavailableError) -> None:
        """The engine has gone: end what cannot go on with another one. calls: that wait for their answers."""
        for call, stream in [*self._streams.items()]:
            if call not in calls and not stream.reply_id:
                self.forget(call)
                stream.fail(error)

    def fail(self, error: EngineUnavailableError) -> None:
        """End all with an error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def returning(self) -> dict[int, CallStream]:
        """Those that can go on with the next engine."""
        return {call: stream for call, stream in self._streams.items() if stream.reply_id}

    def go_on(self, call: int, stream: CallStream, returned: ReturnedStream) -> None:
        """A stream goes on with the next engine, which may not have got what the one before was told."""
        for told in stream.told:
            self._send(told)
        stream.reader = returned.reader
        if stream.has_left or call not in self._streams:
            self._send(LeaveReply(stream.reply_id, stream.reader))


def named(streams: dict[int, CallStream]) -> list[ReturningStream]:
    """Streams as they are named to the next engine."""
    return [
        ReturningStream(call, stream.reply_id, stream.num_had, stream.submission is not None)
        for call, stream in streams.items()
    ]
