"""Where outputs go, and what is told again to the next engine."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.engine.request import (
    EngineUnavailableError,
    FinishedOutput,
    RequestHandle,
    Submission,
    TakenOver,
    TokensOutput,
)
from eventlm.frontend.call_streams import CallStream, CallStreams, named
from eventlm.frontend.protocol import (
    CancelRequest,
    EndText,
    LeaveReply,
    Lost,
    Outputs,
    ReturnedStream,
    ReturningStream,
)

TOKENS = TokensOutput(0, 0, [65])
DONE = FinishedOutput(0, "length", 1, 0)


class Desk:
    """Streams, what they have told the engine, and what they got."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.heard: list[Any] = []
        self.streams = CallStreams(self.told.append)

    def edge(self, call: int, *, n: int = 1, prompts: int = 1, **fields: Any) -> CallStream:
        """The stream of call N, an edge of reply cmpl-N with the requests 10 * N and the next ones."""
        handles = [RequestHandle(-1, n, lambda *_: None, lambda *_: None) for _ in range(prompts)]
        stream = CallStream(lambda index, output: self.heard.append((index, output)), [n] * prompts, handles)
        stream.returns(Submission(reply_id=f"cmpl-{call}", edge_returns=True, **fields))
        self.streams.add(call, stream)
        self.streams.note_seqs(stream, list(range(10 * call, 10 * call + prompts)))
        return stream

    def reader(self, call: int, reader: int) -> CallStream:
        stream = CallStream(lambda index, output: self.heard.append((index, output)), [])
        self.streams.add(call, stream)
        self.streams.note_reader(stream, "cmpl-9", reader)
        return stream


@pytest.mark.parametrize("is_resumable", [False, True])
def test_an_edge_ends_with_its_last_sequence(*, is_resumable: bool) -> None:
    desk = Desk()
    desk.edge(1, n=2, prompts=2, is_resumable=is_resumable)
    ends: list[tuple[int, int, Any]] = [(1, 0, DONE), (1, 1, DONE), (1, 0, DONE), (1, 1, DONE)]
    desk.streams.take(Outputs([*ends[:3], (2, 0, TOKENS)]))
    assert (len(desk.heard), len(desk.streams), desk.told) == (3, 1, [])
    desk.streams.take(Outputs([ends[3], (1, 0, TOKENS)]))
    assert (len(desk.heard), len(desk.streams), desk.streams.num_edges) == (4, 0, 0)
    # A client may still come back for one that is resumable.
    assert desk.told == ([] if is_resumable else [LeaveReply("cmpl-1", 0)])


def test_a_request_that_is_lost_ends_all_its_sequences() -> None:
    desk = Desk()
    desk.edge(1, n=3)
    desk.streams.take(Outputs([(1, 0, Lost("a defect"))]))
    assert [str(output) for _, output in desk.heard] == ["a defect"]
    assert len(desk.streams) == 0


def test_outputs_are_counted_as_the_engine_keeps_them() -> None:
    desk = Desk()
    desk.edge(1)
    desk.reader(2, 1)
    desk.streams.take(Outputs([(1, 0, TOKENS), (2, 0, TOKENS), (1, 0, TOKENS), (2, 0, TakenOver())]))
    streams = desk.streams.returning()
    assert named(streams) == [ReturningStream(1, "cmpl-1", 2, True), ReturningStream(2, "cmpl-9", 1, False)]


def test_what_was_told_of_a_request_is_told_again_until_it_is_over() -> None:
    desk = Desk()
    stream = desk.edge(1)
    messages = [EndText(10, 0, 3, "stop"), CancelRequest(10, "client"), CancelRequest(77, "client")]
    for message in messages:
        desk.streams.tell(message)  # type: ignore[arg-type]
    assert desk.streams.leave("cmpl-1", 0) == 0
    assert desk.told == messages
    desk.told.clear()
    desk.streams.go_on(1, stream, ReturnedStream([10], 0))
    assert desk.told == [*messages[:2], LeaveReply("cmpl-1", 0)]
    desk.streams.take(Outputs([(1, 0, DONE)]))
    desk.told.clear()
    desk.streams.tell(CancelRequest(10, "client"))
    assert (desk.told, len(stream.told)) == ([CancelRequest(10, "client")], 2)


def test_a_reader_that_leaves_has_its_present_number() -> None:
    desk = Desk()
    stream, gone = desk.reader(1, 1), desk.reader(2, 2)
    assert desk.streams.leave("cmpl-9", 2) == 2
    desk.streams.go_on(1, stream, ReturnedStream([90], 7))
    desk.streams.go_on(2, gone, ReturnedStream([90], 8))
    assert desk.told == [LeaveReply("cmpl-9", 8)]
    assert (desk.streams.leave("cmpl-9", 1), len(desk.streams), desk.streams.num_readers) == (7, 0, 0)


def test_what_cannot_go_on_ends_in_a_pause() -> None:
    desk = Desk()
    desk.edge(1)
    for call in (2, 3):
        # Neither is a reply that the next engine could have.
        desk.streams.add(call, CallStream(lambda index, output: desk.heard.append((index, output)), [1, 0]))
    error = EngineUnavailableError("it has died")
    desk.streams.pause({3}, error)
    assert desk.heard == [(0, error)]
    assert [call in desk.streams for call in (1, 2, 3)] == [True, False, True]
    desk.streams.fail(error)
    assert (desk.heard, len(desk.streams)) == ([(0, error)] * 3, 0)
