"""Replies by id: owners, readers that take over, time and memory."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.config import ServerConfig
from eventlm.engine.backend import AnswerDelta, CallPart, ForwardedRequest
from eventlm.engine.request import (
    ClosingOutput,
    EngineUnavailableError,
    FinishedOutput,
    IdempotencyKey,
    KeyReusedError,
    KeyTakenError,
    PooledOutput,
    PromptLogprobsOutput,
    Request,
    Submission,
    TakenOver,
    TextOutput,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.engine.request_registry import Reply, RequestRegistry, reply_status
from eventlm.engine.spool.records import KeptReply
from eventlm.events import TextEnded
from eventlm.metrics.rows import EndedRows
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import FinishReason
from tests.core.rig import Rig, arrival
from tests.made_requests import make_request
from tests.metrics.test_rows import row

KEEP_NS = 1_000
KEY = IdempotencyKey(b"key", b"request")
LOGPROBS = TokenLogprobs(
    logprobs=[-0.5, float("-inf")], ranks=[1, 7], top_ids=[[3, 4], []], top_logprobs=[[-0.5, -1.0], []]
)


class Desk:
    """A registry with its clock, and what it asked for."""

    def __init__(self, *, keep_ns: int = KEEP_NS, max_bytes: int = 1 << 20, max_replies: int = 100) -> None:
        self.now_ns = 0
        self.cancelled: list[int] = []
        self.wakes: list[int] = []
        self.registry = RequestRegistry(
            keep_ns=keep_ns,
            max_bytes=max_bytes,
            now_ns=lambda: self.now_ns,
            cancel=self.cancelled.append,
            wake=self.wakes.append,
            max_replies=max_replies,
        )

    def open(
        self,
        reply_id: str,
        *,
        n: int = 1,
        prompts: int = 1,
        forwarded: ForwardedRequest | None = None,
        **fields: Any,
    ) -> Wire:
        submission = Submission(reply_id=reply_id, is_resumable=True, **fields)
        return Wire(self, submission, n=n, prompts=prompts, forwarded=forwarded)

    def expire_at(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.registry.expire()


class Wire:
    """One reply: `say` what the engine says, `heard` is what its edge got."""

    num_requests = 0

    def __init__(
        self, desk: Desk, submission: Submission, *, n: int, prompts: int, forwarded: ForwardedRequest | None = None
    ) -> None:
        self.heard: list[Any] = []
        request = Request(
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(n=n),
            scheduling=SchedulingParams(model="m"),
            forwarded=forwarded,
        )
        self.group = [request] * prompts
        reply = Reply(submission, self.group, [self.heard.append] * prompts)
        self.puts = desk.registry.sinks(reply)
        self.requests = list(range(Wire.num_requests, Wire.num_requests + prompts))
        Wire.num_requests += prompts
        desk.registry.add(reply, self.requests)

    def say(self, *outputs: Any, index: int = 0) -> None:
        for output in outputs:
            self.puts[index](output)


def check_key(desk: Desk, key: IdempotencyKey = KEY, owner: str = "") -> None:
    desk.registry.check_key(Submission(reply_id="another", owner=owner, idempotency_key=key))


class Reader:
    """A later reader."""

    def __init__(self, desk: Desk, reply_id: str, owner: str = "") -> None:
        self.heard: list[Any] = []
        self.reply = desk.registry.resume(reply_id, owner, lambda index, output: self.heard.append((index, output)))


def tokens(start: int, *token_ids: int, index: int = 0) -> TokensOutput:
    return TokensOutput(index, start, list(token_ids))


END = FinishedOutput(0, "length", 3, 0)


def test_a_later_reader_gets_past_and_future_outputs() -> None:
    desk = Desk()
    wire = desk.open("r", prompts=2, edge_state=b"state")
    said = [
        (0, PromptLogprobsOutput(0, 1, LOGPROBS)),
        (1, TokensOutput(0, 0, [5, 6], LOGPROBS)),
        (0, PooledOutput(0, b"\x00\xff")),
        (0, TextOutput(0, 0, AnswerDelta("größer", 2, calls=[CallPart(0, "add", "{}")], logprobs=b"[]"))),
        (1, ClosingOutput(0, "eos", 2)),
    ]
    for index, output in said:
        wire.say(output, index=index)
    reader = Reader(desk, "r")
    assert reader.heard == said
    assert (reader.reply.submission.edge_state, reader.reply.requests, reader.reply.reader) == (
        b"state",
        wire.requests,
        1,
    )
    assert [request.prompt_token_ids for request in reader.reply.group] == [[1, 2]] * 2
    assert wire.heard == [*(output for _, output in said), TakenOver()]
    wire.say(END, index=1)
    assert reader.heard[-1] == (1, END)
    assert wire.heard[-1] == END


def test_the_newer_reader_takes_over() -> None:
    desk = Desk()
    wire = desk.open("r")
    wire.say(tokens(0, 1))
    first, second = Reader(desk, "r"), Reader(desk, "r")
    assert first.heard == [(0, tokens(0, 1)), (0, TakenOver())]
    wire.say(tokens(1, 2), END)
    assert len(first.heard) == 2
    assert second.heard == [(0, tokens(0, 1)), (0, tokens(1, 2)), (0, END)]
    assert wire.heard.count(TakenOver()) == 1
    # Who was taken over from has nothing to say any more.
    desk.registry.leave("r", first.reply.reader)
    desk.registry.leave("r", 0)
    wire.say(tokens(2, 3))
    assert second.heard[-1] == (0, tokens(2, 3))


def test_somebody_elses_reply_does_not_exist() -> None:
    desk = Desk()
    desk.open("r", owner="a")
    assert desk.registry.find("r", "a").submission.owner == "a"
    messages = set()
    for reply_id, owner in (("r", "b"), ("r", ""), ("R", "a")):
        with pytest.raises(UnknownReplyError) as error:
            desk.registry.find(reply_id, owner)
        with pytest.raises(UnknownReplyError):
            Reader(desk, reply_id, owner)
        messages.add(str(error.value).lower())
    assert len(messages) == 1


def test_without_a_reader_it_is_cancelled_after_a_while() -> None:
    desk = Desk()
    wire = desk.open("r", prompts=2)
    wire.say(tokens(0, 1))
    desk.registry.leave("r", 0)
    assert desk.wakes == [KEEP_NS]
    desk.expire_at(KEEP_NS - 1)
    assert (desk.cancelled, desk.wakes) == ([], [KEEP_NS, 1])
    wire.say(tokens(1, 2))
    assert wire.heard[-1] == tokens(1, 2)
    desk.expire_at(KEEP_NS)
    assert desk.cancelled == wire.requests
    assert desk.registry.num_bytes == 0
    with pytest.raises(UnknownReplyError, match="no longer"):
        Reader(desk, "r")
    assert desk.registry.find("r", "").requests == wire.requests


def test_what_runs_on_needs_no_reader_and_is_kept_for_a_while_after_its_end() -> None:
    desk = Desk()
    wire = desk.open("r", runs_on=True)
    reader = Reader(desk, "r")
    desk.registry.leave("r", reader.reply.reader)
    desk.registry.leave("r", 0)
    assert desk.wakes == []
    desk.expire_at(10 * KEEP_NS)
    wire.say(tokens(0, 1), END)
    assert wire.heard == [TakenOver(), tokens(0, 1), END]
    assert (desk.wakes, desk.cancelled) == ([KEEP_NS], [])
    desk.expire_at(11 * KEEP_NS - 1)
    assert len(Reader(desk, "r").heard) == 2
    desk.registry.leave("r", 2)
    desk.expire_at(12 * KEEP_NS)
    with pytest.raises(UnknownReplyError):
        Reader(desk, "r")
    assert (desk.registry.num_bytes, desk.cancelled) == (0, [])


def test_what_runs_on_loses_its_outputs_over_the_bound_and_runs_on() -> None:
    desk = Desk(max_bytes=1_000)
    wire = desk.open("r", runs_on=True)
    desk.registry.leave("r", Reader(desk, "r").reply.reader)
    wire.say(*[tokens(index, 1) for index in range(100)])
    with pytest.raises(UnknownReplyError):
        Reader(desk, "r")
    wire.say(END)
    assert (wire.heard[-1], desk.cancelled, desk.wakes) == (END, [], [])


def test_replies_that_run_on_are_kept_where_streams_cannot_be_resumed() -> None:
    for seconds, kept_seconds in ((0, 300), (7, 7)):
        wakes: list[int] = []
        config = ServerConfig(resume_seconds=seconds)
        registry = RequestRegistry.of(config, lambda: 0, lambda request: None, wakes.append)
        submission = Submission(reply_id="r", is_resumable=True, runs_on=True)
        request = Request(prompt_token_ids=[1], sampling=SamplingParams(), scheduling=SchedulingParams(model="m"))
        [put] = registry.sinks(reply := Reply(submission, [request], [lambda output: None]))
        registry.add(reply, [1])
        put(END)
        registry.leave("r", 0)
        assert wakes == [kept_seconds * 10**9]


def test_a_reader_in_time_stops_the_clock() -> None:
    desk = Desk()
    desk.open("r")
    desk.registry.leave("r", 0)
    desk.now_ns = KEEP_NS - 1
    reader = Reader(desk, "r")
    desk.expire_at(10 * KEEP_NS)
    assert desk.cancelled == []
    desk.registry.leave("r", reader.reply.reader)
    desk.expire_at(11 * KEEP_NS)
    assert len(desk.cancelled) == 1


def test_a_reply_that_is_over_is_kept_for_a_while() -> None:
    desk = Desk()
    wire = desk.open("r", n=2)
    wire.say(tokens(0, 1), END)
    wire.say(tokens(0, 1, index=1), FinishedOutput(1, "length", 1, 0))
    # The edge may still be sending to a client that reads slowly.
    assert desk.wakes == []
    desk.now_ns = 10 * KEEP_NS
    desk.registry.leave("r", 0)
    desk.expire_at(11 * KEEP_NS - 1)
    reader = Reader(desk, "r")
    assert (len(reader.heard), reader.reply.num_outputs) == (4, 4)
    desk.expire_at(20 * KEEP_NS)
    desk.registry.leave("r", reader.reply.reader)
    desk.expire_at(21 * KEEP_NS)
    with pytest.raises(UnknownReplyError):
        Reader(desk, "r")
    assert (desk.registry.num_bytes, desk.cancelled) == (0, [])


def test_memory_is_bounded_and_what_ended_first_goes_first() -> None:
    desk = Desk(max_bytes=3_000)
    live, ended, other = desk.open("live"), desk.open("ended"), desk.open("other")
    for wire in (live, ended, other):
        wire.say(*[tokens(index, 1) for index in range(8)])
    ended.say(END)
    for index in range(100):
        other.say(tokens(8 + index, 1))
        assert desk.registry.num_bytes <= 3_000
        if index == 15:
            with pytest.raises(UnknownReplyError):
                Reader(desk, "ended")
            assert len(Reader(desk, "live").heard) == 8
    for reply_id in ("live", "other"):
        with pytest.raises(UnknownReplyError):
            Reader(desk, reply_id)
    # Whoever reads goes on; whoever leaves cannot come back.
    assert (desk.registry.num_bytes, desk.cancelled) == (0, [])
    assert len(other.heard) == 108
    desk.registry.leave("other", 0)
    assert desk.cancelled == other.requests


def test_what_loses_its_outputs_without_a_reader_is_cancelled() -> None:
    desk = Desk(max_bytes=1_000)
    wire = desk.open("r")
    desk.registry.leave("r", 0)
    wire.say(*[tokens(index, 1) for index in range(100)])
    assert desk.cancelled == wire.requests


def test_what_was_submitted_counts() -> None:
    desk = Desk(max_bytes=1_000)
    desk.open("r", edge_state=bytes(2_000))
    assert desk.registry.num_bytes == 0
    with pytest.raises(UnknownReplyError):
        Reader(desk, "r")


def test_what_is_forwarded_counts_too() -> None:
    desk = Desk()
    desk.open("r", forwarded=ForwardedRequest(endpoint="chat", body=bytes(500)))
    assert desk.registry.num_bytes == 2 * 40 + 500


def test_the_number_of_replies_is_bounded() -> None:
    desk = Desk(max_replies=2)
    wires = [desk.open(str(number)) for number in range(3)]
    # What runs must be found when its reader leaves.
    assert desk.registry.find("0", "").requests == wires[0].requests
    wires[1].say(tokens(0, 1), END)
    desk.open("3")
    with pytest.raises(UnknownReplyError):
        desk.registry.find("1", "")
    assert desk.registry.num_bytes == 3 * 2 * 40
    plain = Desk(max_replies=2, keep_ns=0)
    for number in range(3):
        plain.open(str(number))
    with pytest.raises(UnknownReplyError):
        plain.registry.find("0", "")


def test_without_keeping() -> None:
    desk = Desk(keep_ns=0)
    wire = desk.open("r")
    assert wire.puts == [wire.heard.append]
    with pytest.raises(UnknownReplyError, match="cannot be resumed"):
        Reader(desk, "r")
    desk.registry.leave("r", 0)
    assert desk.cancelled == wire.requests


def test_a_reply_can_be_read_again_by_its_requests_id() -> None:
    desk = Desk()
    wire = desk.open("r", request_id="mine", owner="a")
    desk.registry.leave("r", 0)
    reader = Reader(desk, "mine", "a")
    desk.expire_at(10 * KEEP_NS)
    wire.say(tokens(0, 1))
    assert reader.heard == [(0, tokens(0, 1))]
    assert desk.registry.num_bytes > 0
    desk.registry.leave(reader.reply.submission.reply_id, reader.reply.reader)
    desk.expire_at(11 * KEEP_NS)
    assert desk.cancelled == wire.requests
    assert desk.registry.num_bytes == 0


def test_one_wake_at_a_time_is_asked_for() -> None:
    desk = Desk()
    desk.open("r")
    desk.registry.leave("r", 0)
    for _ in range(10):
        desk.registry.leave("r", Reader(desk, "r").reply.reader)
    assert desk.wakes == [KEEP_NS]
    desk.expire_at(KEEP_NS)
    desk.open("s")
    desk.registry.leave("s", 0)
    assert desk.wakes == [KEEP_NS, KEEP_NS]


def test_nothing_of_a_request_stays_with_what_is_not_kept() -> None:
    desk = Desk()
    wires = [desk.open(name, edge_state=b"body") for name in ("whole", "left")]
    never = Desk(keep_ns=0)
    never.open("r", edge_state=b"body")
    plain = Reply(Submission(reply_id="p", edge_state=b"body"), wires[0].group, [print])
    assert desk.registry.sinks(plain) == [print]
    replies = [plain, never.registry.find("r", "")]
    for name in ("whole", "left"):
        replies.append(desk.registry.find(name, ""))
        desk.registry.leave(name, 0)
    assert replies[-1].group
    desk.expire_at(KEEP_NS)
    assert [(list(reply.group), list(reply.edge), reply.submission.edge_state) for reply in replies] == [
        ([], [], b"")
    ] * 4


def test_the_engines_death_reaches_every_reader() -> None:
    desk = Desk()
    wire = desk.open("r")
    reader = Reader(desk, "r")
    error = EngineUnavailableError("dead")
    wire.say(error)
    assert reader.heard == [(0, error)]
    assert wire.heard[-1] == error
    assert desk.registry.num_bytes == 0


def test_readers_of_a_reply_with_a_key_join() -> None:
    desk = Desk()
    wire = desk.open("r", idempotency_key=KEY)
    wire.say(tokens(0, 1))
    first, second = Reader(desk, "r"), Reader(desk, "r")
    wire.say(tokens(1, 2))
    assert desk.registry.find_by_key(KEY, "").submission.reply_id == "r"
    for reader in (0, first.reply.reader):
        desk.registry.leave("r", reader)
    assert desk.wakes == []
    wire.say(END)
    whole = [(0, tokens(0, 1)), (0, tokens(1, 2)), (0, END)]
    assert (second.heard, first.heard) == (whole, whole[:2])
    assert wire.heard == [output for _, output in whole]
    desk.registry.leave("r", second.reply.reader)
    assert desk.wakes == [KEEP_NS]
    desk.expire_at(KEEP_NS - 1)
    late = Reader(desk, "r")
    assert late.heard == whole
    desk.registry.leave("r", late.reply.reader)
    desk.expire_at(2 * KEEP_NS)
    check_key(desk)
    with pytest.raises(UnknownReplyError):
        desk.registry.find_by_key(KEY, "")


def test_a_key_belongs_to_one_request_of_its_owner() -> None:
    desk = Desk()
    check_key(desk)
    desk.open("r", owner="a", idempotency_key=KEY)
    with pytest.raises(KeyTakenError):
        check_key(desk, owner="a")
    for key, owner in ((KEY, "b"), (IdempotencyKey(b"other", KEY.request), "a")):
        check_key(desk, key, owner)
        with pytest.raises(UnknownReplyError):
            desk.registry.find_by_key(key, owner)
    changed = IdempotencyKey(KEY.digest, b"changed")
    with pytest.raises(KeyReusedError):
        check_key(desk, changed, "a")
    with pytest.raises(KeyReusedError):
        desk.registry.find_by_key(changed, "a")


@pytest.mark.parametrize("reason", ["deadline", "cancelled", "front_end_lost", "error"])
def test_a_reply_that_fails_frees_its_key(reason: FinishReason) -> None:
    desk = Desk()
    wire = desk.open("r", n=2, idempotency_key=KEY)
    wire.say(tokens(0, 1), FinishedOutput(1, "length", 0, 0))
    with pytest.raises(KeyTakenError):
        check_key(desk)
    wire.say(FinishedOutput(0, reason, 1, 0))
    check_key(desk)
    # Whoever knows its id can still read how it failed. Its end does not free the key of the next one.
    assert len(Reader(desk, "r").heard) == 3
    desk.open("s", idempotency_key=KEY)
    desk.registry.drop(desk.registry.find("r", ""))
    assert desk.registry.find_by_key(KEY, "").submission.reply_id == "s"


def test_a_reply_whose_outputs_are_dropped_frees_its_key() -> None:
    desk = Desk(max_bytes=1_000)
    wire = desk.open("r", idempotency_key=KEY)
    reader = Reader(desk, "r")
    wire.say(*[tokens(index, 1) for index in range(100)])
    check_key(desk)
    desk.registry.leave("r", 0)
    # Its reader goes on, and it ends when nobody is left.
    assert (len(reader.heard), desk.cancelled) == (100, [])
    desk.registry.leave("r", reader.reply.reader)
    assert desk.cancelled == wire.requests
    desk.open("s", idempotency_key=KEY).say(EngineUnavailableError("dead"))
    check_key(desk)


def reply_of(*requests: tuple[int, int], **fields: Any) -> Reply:
    """A reply of requests with these seqs and numbers of samples."""
    group = [
        Request(prompt_token_ids=[1], sampling=SamplingParams(n=n), scheduling=SchedulingParams(model="m"))
        for _, n in requests
    ]
    reply = Reply(Submission(reply_id="id", **fields), group, [])
    reply.requests = [seq for seq, _ in requests]
    return reply


def states(rig: Rig, *requests: tuple[int, int], rows: EndedRows | None = None) -> list[tuple[str, int]]:
    status = reply_status(reply_of(*requests), rig.state, rows or EndedRows())
    assert status.reply_id == "id"
    return [(sample.state, sample.output_tokens) for sample in status.samples]


def test_a_sequence_from_its_arrival_to_its_end() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.arrive(4, 2, has_text_ends=True)
    second = rig.arrive(4, 9, n=2)
    both = ((first, 1), (second, 2))
    assert states(rig, *both) == [("running", 0), ("waiting", 0), ("waiting", 0)]
    rig.complete()
    assert states(rig, *both)[0] == ("running", 1)
    rig.complete()
    assert states(rig, *both)[0] == ("ending", 2)
    rig.feed(TextEnded(request=first, index=0, position=2))
    assert states(rig, *both)[0] == ("finished", 0)
    rows = EndedRows()
    rows.request_ended(row(first))
    assert states(rig, *both, rows=rows)[0] == ("finished", 1)


def test_one_that_was_preempted_waits_again() -> None:
    rig = Rig(max_num_seqs=1)
    seq = rig.arrive(4, 9, priority=5)
    rig.complete()
    urgent = rig.arrive(4, 9, priority=-5)
    rig.complete()
    assert states(rig, (seq, 1), (urgent, 1)) == [("preempted", 2), ("running", 0)]


def test_after_the_engine_has_stopped_everything_is_over() -> None:
    status = reply_status(reply_of((1, 1)), None, EndedRows())
    assert [sample.state for sample in status.samples] == ["finished"]


def test_a_search_shows_its_results_and_how_many_requests_it_has_added() -> None:
    rig = Rig()
    root, first, second = rig.arrive_all(*(arrival(4, 8) for _ in range(3)))
    reply = reply_of((root, 1), search_tokens=100, search_sequences=4, search_choices=2)
    reply.add([first, second])
    shown = [(0, "running", None), (1, "running", None)]
    for expected in (shown, [(index, "finished", None) for index, *_ in shown]):
        status = reply_status(reply, rig.state, EndedRows())
        assert [(each.index, each.state, each.output_tokens) for each in status.samples] == expected
        assert status.num_branches == 2
        reply.close()


def test_a_search_does_not_go_on_without_its_edge() -> None:
    registry = Desk().registry
    submission = Submission(reply_id="r", search_tokens=10, search_sequences=2, search_choices=1)
    kept = KeptReply([], submission, [make_request([1], SamplingParams())], [3], [1], num_unfinished=1)
    registry.restore(kept)
    assert not registry.find("r", "").is_open
