"""Replies whose edges come back to the next engine, or die before them."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.engine.group_admission import reply_with_sinks
from eventlm.engine.request import FinishedOutput, Request, Submission, TokensOutput, UnknownReplyError
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import KeptReply, KeptRequest
from eventlm.sampling_params import SamplingParams
from tests.made_requests import make_request

#: They are in front end 1.
GROUP: list[Request] = [make_request([1, 2], SamplingParams()).with_scheduling(front_end=1)]
OUTPUTS = [TokensOutput(0, position, [65 + position]) for position in range(3)]
DONE = FinishedOutput(0, "length", 3, 0)


class Desk:
    """A registry, and which requests it has cancelled."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.cancelled: list[int] = []
        self.wakes: list[int] = []
        self.registry = RequestRegistry(
            keep_ns=1000, max_bytes=max_bytes, now_ns=lambda: 0, cancel=self.cancelled.append, wake=self.wakes.append
        )
        self.heard: list[Any] = []

    def on_output(self, index: int, output: Any) -> None:
        self.heard.append(output)

    def submit(self, number: int, **fields: Any) -> Any:
        """Reply cmpl-NUMBER of request NUMBER; where its outputs go."""
        submission = Submission(reply_id=f"cmpl-{number}", edge_returns=True, **fields)
        reply, [put] = reply_with_sinks(self.registry, submission, GROUP, [self.heard.append], charge=None)
        self.registry.add(reply, [number])
        return put

    def next_desk(self, *numbers: int) -> dict[int, Any]:
        """Another registry in place of this one; where the outputs of these replies go."""
        replies = {number: self.registry.find(f"cmpl-{number}", "") for number in numbers}
        Desk.__init__(self)
        puts = {}
        for number, reply in replies.items():
            kept = KeptReply(
                live=[KeptRequest(number, GROUP[0], 1, "", "", [], [])],
                submission=reply.submission,
                group=GROUP,
                requests=[number],
                samples=[1],
                outputs=reply.outputs,
                num_unfinished=reply.num_unfinished,
            )
            [puts[number]] = self.registry.restore(kept)
        return puts

    def come_back(self, number: int, num_had: int, *, is_edge: bool = True) -> None:
        self.registry.come_back(f"cmpl-{number}", self.on_output, num_had, 1, is_edge=is_edge)


def test_an_edge_goes_on_after_what_it_has_had() -> None:
    desk = Desk()
    put = desk.submit(1)
    for output in OUTPUTS[:2]:
        put(output)
    assert desk.heard == OUTPUTS[:2]
    put = desk.next_desk(1)[1]
    desk.come_back(1, 1)
    put(OUTPUTS[2])
    put(DONE)
    assert desk.heard == [*OUTPUTS[1:], DONE]
    assert desk.registry.edges_have_left([1]) == []
    # Only its edge can read it again.
    with pytest.raises(UnknownReplyError, match="cannot be resumed"):
        desk.registry.resume("cmpl-1", "", desk.on_output)
    desk.registry.leave("cmpl-1", 0)
    assert desk.registry.num_bytes == 0


def test_an_edge_that_has_had_more_or_has_left_cannot_come_back() -> None:
    desk = Desk()
    for number in (1, 2, 3):
        desk.submit(number)(OUTPUTS[0])
    desk.registry.leave("cmpl-3", 0)
    assert desk.cancelled == [3]
    desk.next_desk(1, 2)
    desk.come_back(2, 1)
    for number, num_had in ((1, 2), (2, 1), (3, 1)):
        with pytest.raises(UnknownReplyError):
            desk.come_back(number, num_had)


def test_what_may_have_been_lost_must_not_have_been_seen() -> None:
    desk = Desk()
    desk.submit(1)(OUTPUTS[0])
    put = desk.next_desk(1)[1]
    desk.registry.rewind()
    put(OUTPUTS[1])
    with pytest.raises(UnknownReplyError):
        desk.come_back(1, 2)
    desk.come_back(1, 1)


def test_of_edges_that_do_not_come_back_only_resumable_replies_go_on() -> None:
    desk = Desk()
    for number in (1, 2, 3):
        desk.submit(number, is_resumable=number == 2)(OUTPUTS[0])
    desk.next_desk(1, 2, 3)
    desk.come_back(3, 1)
    # Request 4 is no reply's.
    assert desk.registry.edges_have_left([1, 2, 3, 4]) == [1, 4]
    assert [reply.submission.reply_id for reply in desk.registry.orphans()] == ["cmpl-2"]
    assert (desk.cancelled, len(desk.wakes)) == ([1], 1)
    # Its client may come back still.
    desk.come_back(2, 0, is_edge=False)
    assert desk.heard == OUTPUTS[:1]


def test_resumable_replies_of_a_front_end_that_dies_are_orphans() -> None:
    desk = Desk()
    puts = [desk.submit(number, is_resumable=number != 1) for number in (1, 2, 3)]
    desk.registry.find("cmpl-3", "").loose_edge.front_end = 2  # type: ignore[union-attr]
    assert desk.registry.edges_have_died(1) == {2, 3}
    [orphan] = desk.registry.orphans()
    puts[1](OUTPUTS[0])
    assert desk.heard == []
    heard: list[Any] = []
    orphan.adopt(lambda _, output: heard.append(output))
    puts[1](DONE)
    assert heard == [OUTPUTS[0], DONE]
    # It is the engine's own now.
    desk.registry.edges_have_died(1)
    assert desk.registry.orphans() == []


def test_over_the_bound_an_edge_reads_on_and_cannot_come_back() -> None:
    desk = Desk(max_bytes=600)
    put = desk.submit(1)
    for output in OUTPUTS * 4:
        put(output)
    assert desk.heard == OUTPUTS * 4
    assert desk.registry.find("cmpl-1", "").outputs is None
    assert desk.cancelled == []
