"""The attempts of a run: what each found at its server, and how it went on."""

from __future__ import annotations

from msgspec import structs

from eventlm.events import (
    BackendState,
    BackendUp,
    Event,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Gap,
    Streamed,
    Withdrawn,
)
from eventlm.replay.cost.recorded_forwards import ForwardCollector
from tests.made_requests import make_arrival


def collected(*events: Event) -> ForwardCollector:
    """A collector that has taken these, after the arrivals 1 to 3 of 100 tokens at server 0."""
    collector = ForwardCollector()
    collector.apply(BackendUp(replica=0, epoch=1, name="a:1", kind="vllm"))
    for seq in (1, 2, 3):
        collector.apply(structs.replace(make_arrival(prompt_tokens=100), s=seq))
    for event in events:
        collector.apply(event)
    return collector


def sent(ts: int, request: int, attempt: int = 1, *, cached: int = 0, replica: int = 0) -> Forwarded:
    return Forwarded(
        ts=ts, request=request, index=0, replica=replica, attempt=attempt, cached_tokens=cached, running=1, limit=8
    )


def rows(ts: int, *rows: tuple[int, int, int, int]) -> Streamed:
    return Streamed(ts=ts, rows=list(rows))


def ended(ts: int, request: int, num_tokens: int) -> ForwardEnded:
    return ForwardEnded(
        ts=ts, request=request, index=0, attempt=1, reason="stop", num_tokens=num_tokens, prompt_tokens=100,
        cached_tokens=64,
    )  # fmt: skip


def test_an_answer_has_its_times_and_its_company() -> None:
    first, second = collected(
        sent(10, 1, cached=80),
        rows(30, (1, 0, 1, 1)),
        sent(40, 2),
        rows(60, (1, 0, 1, 2), (2, 0, 1, 1)),
        rows(100, (1, 0, 1, 4), (2, 0, 1, 3)),
        ended(110, 1, 4),
    ).forwards
    assert (first.name, first.kind, first.prompt_tokens, first.num_ahead, first.num_running) == (
        "a:1",
        "vllm",
        20,
        0,
        0,
    )
    assert (first.sent_ns, first.first_ns, first.last_ns, first.ended_ns) == (10, 30, 100, 110)
    assert (first.num_first, first.num_tokens, first.told_tokens, first.told_cached) == (1, 4, 100, 64)
    # Alone for 30 ns, then two of them for 40.
    assert (first.running_ns, first.entered_tokens) == (30 + 2 * 40, 100)
    assert (second.num_ahead, second.num_running, second.running_ns, second.ended_ns) == (1, 1, 2 * 40, -1)
    assert first.shape.prefill_tokens == 20


def test_what_goes_leaves_its_server() -> None:
    failed = ForwardFailed(ts=20, request=1, index=0, attempt=1, kind="server")
    forwards = collected(
        sent(10, 1),
        failed,
        sent(30, 1, attempt=2),
        rows(40, (1, 0, 2, 3)),
        Withdrawn(ts=50, request=1, index=0, replica=0, attempt=2),
        sent(60, 2),
        Finished(ts=70, request=2, index=0, reason="cancelled", position=0),
        sent(80, 1, attempt=3),
    ).forwards
    assert forwards[0].failure is failed
    assert [each.num_ahead for each in forwards] == [0, 0, 0, 0]
    assert [each.ended_ns for each in forwards] == [20, -1, -1, -1]
    # It goes on from what was shown.
    assert forwards[3].all_tokens == 103


def test_a_gap_ends_what_was_under_way() -> None:
    forwards = collected(sent(10, 1), Gap(ts=20, first=5, last=9, reason="lag"), sent(30, 2)).forwards
    assert [each.num_ahead for each in forwards] == [0, 0]


def test_slots_are_what_ran_while_others_waited() -> None:
    states = [BackendState(replica=0, epoch=1, running=n, waiting=w) for n, w in ((3, 0), (8, 1), (8, 4), (7, 1))]
    assert collected(*states).slots == {0: 8}
    assert collected().slots == {}


def test_a_request_that_waits_for_the_next_step_waits_for_no_slot() -> None:
    """What waited was soon under way beside all that ran: that server had room for it."""
    told = BackendState(ts=35, replica=0, epoch=1, running=1, waiting=1)
    begun = rows(40, (2, 0, 1, 1)), rows(50, (1, 0, 1, 2), (2, 0, 1, 2))
    assert collected(sent(10, 1), rows(20, (1, 0, 1, 1)), sent(30, 2), told, *begun).slots == {}
    later = structs.replace(told, ts=60, running=2)
    assert collected(sent(10, 1), rows(20, (1, 0, 1, 1)), sent(30, 2), told, *begun, later).slots == {0: 2}


def test_as_many_as_ran_at_once_have_slots() -> None:
    """A server that is short of memory runs now more and now fewer while others wait."""
    sends = [sent(10, request) for request in (1, 2, 3)] + [sent(10, 1, attempt=2)]
    begin = rows(20, (1, 0, 1, 1), (2, 0, 1, 1), (3, 0, 1, 1), (1, 0, 2, 1))
    told = BackendState(ts=30, replica=0, epoch=1, running=3, waiting=2)
    assert collected(*sends, begin, rows(40, (2, 0, 1, 2)), told).slots == {0: 4}


def test_an_answer_may_begin_in_the_slot_of_one_that_ends_in_the_same_drain() -> None:
    told = BackendState(ts=15, replica=0, epoch=1, running=1, waiting=1)
    drain = rows(30, (1, 0, 1, 2), (2, 0, 1, 1)), ended(30, 1, 2), rows(40, (2, 0, 1, 2))
    assert collected(sent(10, 1), rows(12, (1, 0, 1, 1)), sent(14, 2), told, *drain).slots == {0: 1}
