"""Second executions for a key are found, and replies that differ."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest

from eventlm.events import Admitted, Arrived, Event, Finished
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import FinishReason
from tests.world.invariants.checks import BrokenInvariant, Checks
from tests.world.invariants.executions import Executions, Joins
from tests.world.machine.world import SECOND
from tests.world.plans.plan import Visit
from tests.world.programs.client import Client
from tests.world.programs.http_client import Reply

KEEP_SECONDS = 60
BODY: dict[str, Any] = {"seed": 7, "stream": False, "max_tokens": 3, "n": 1, "prompt": "p"}
VISIT = Visit(3, 0, BODY, "/v1/completions", idempotency_key="once")


class Story:
    """What is wrong with the events of an engine."""

    def __init__(self, *visits: Visit) -> None:
        self.executions = Executions(visits, KEEP_SECONDS)
        self.wrong: list[str] = []

    def see(self, event: Event) -> None:
        self.wrong += filter(None, [self.executions.see(event)])

    def begin(self, request: int, *, second: int = 0, seed: int = 7) -> None:
        scheduling = SchedulingParams(model="m")
        self.see(Arrived(s=request, prompt_tokens=1, max_tokens=3, seed=str(seed), scheduling=scheduling))
        self.see(Admitted(request=request, ts=second * SECOND))

    def end(self, request: int, reason: FinishReason = "length", *, second: int = 0) -> None:
        self.see(Finished(request=request, index=0, reason=reason, position=3, ts=second * SECOND))


def test_a_second_execution_after_a_good_end() -> None:
    for second, is_wrong in ((59, True), (61, False)):
        story = Story(VISIT)
        story.begin(1, second=1)
        story.end(1, second=50)
        story.begin(2, second=1 + second)
        assert bool(story.wrong) == is_wrong


def test_executions_beside_each_other() -> None:
    for reason in ("stop", "cancelled"):
        story = Story(VISIT)
        story.begin(1)
        story.begin(2)
        story.end(1, reason)
        story.end(2)
        assert story.wrong == (["visit 3: request 1 went on beside the next one"] if reason == "stop" else [])


def test_after_a_failure_it_runs_again() -> None:
    story = Story(VISIT)
    story.begin(1)
    story.end(1, "error")
    story.begin(2)
    story.end(2)
    assert story.wrong == []
    story.begin(3)
    assert story.wrong


def test_what_has_no_key_or_is_deleted_may_run_twice() -> None:
    for visit in (VISIT._replace(idempotency_key=""), VISIT._replace(deletes_after=2)):
        story = Story(VISIT._replace(body=BODY | {"seed": 8}), visit)
        for request in (1, 2):
            story.begin(request)
            story.end(request)
        assert story.wrong == []


class _Client(NamedTuple):
    """A client that has received this."""

    visit: Visit
    replies: list[Reply]


def client(*bodies: bytes, stream: bool = False) -> Client:
    replies = []
    for body in bodies:
        reply = Reply()
        reply.status, reply.is_whole = 200, True
        reply.body += body
        replies.append(reply)
    return cast(Client, _Client(VISIT._replace(body=BODY | {"stream": stream}), replies))


def test_replies_that_differ() -> None:
    joins = Joins(Checks())
    joins.check_client(client(b'{"id":"a","x":1}', b'{"id":"b","x":2}'))
    joins.check_client(client(b'{"id":"a","x":1}'))
    with pytest.raises(BrokenInvariant, match="joined replies are the same"):
        joins.check_client(client(b'{"id":"b","x":3}'))
    event = b'id: %d\ndata: {"id":"c","x":%d}\n\n'
    joins.check_client(client(event % (1, 1) + event % (2, 2), stream=True))
    joins.check_client(client(event % (1, 1), event % (1, 1) + event % (2, 2), stream=True))
    with pytest.raises(BrokenInvariant, match="joined replies are the same"):
        joins.check_client(client(event % (1, 1) + event % (2, 3), stream=True))
