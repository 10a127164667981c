"""Responses in the background: polled, cancelled, and their streams read again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import openai
import pytest

from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves

StartWithClient = Callable[..., tuple[Any, Any]]
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture
def background(start_with_client: StartWithClient) -> tuple[RunningServer, Any]:
    return start_with_client()


def begin(client: Any, input: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model="test", input=input, background=True, **fields)


def poll(client: Any, id: str) -> Any:
    """The response when it has ended."""
    return wait_until(lambda: found if (found := client.responses.retrieve(id)).status in ENDED else None)


@contextmanager
def held(server: RunningServer, *, after: int = 0) -> Iterator[None]:
    """Generations stop after so many tokens until the end of the block."""
    server.engine.step_seconds = 0.0
    server.engine.most_said = server.engine.num_said + after
    yield
    server.engine.most_said = float("inf")


def test_a_response_in_the_background_is_polled(background: Any) -> None:
    server, client = background
    with held(server, after=3):
        begun = begin(client, "What is your name?", metadata={"a": "b"})
        assert (begun.status, begun.output, begun.background) == ("queued", [], True)
        found = client.responses.retrieve(begun.id)
        assert found.status in ("queued", "in_progress")
        assert found.output == []
        [item] = client.responses.input_items.list(begun.id).data
        assert item.content[0].text == "What is your name?"
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            client.responses.create(model="test", input="Go on.", previous_response_id=begun.id)
    ended = poll(client, begun.id)
    assert (ended.status, ended.output_text, ended.metadata) == ("completed", "Hello, world", {"a": "b"})
    assert ended.usage.output_tokens == 12
    assert client.responses.create(model="test", input="Go on.", previous_response_id=begun.id).status == "completed"
    assert _holds(server) == []


def _holds(server: RunningServer) -> list[Any]:
    return list(server.engine.object_store._holders)


def test_one_that_reaches_its_limit_is_incomplete(background: Any) -> None:
    _, client = background
    ended = poll(client, begin(client, max_output_tokens=5).id)
    assert (ended.status, ended.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert ended.output_text == "Hello"


def test_one_that_fails_says_why(background: Any) -> None:
    server, client = background
    server.engine.script_end = "error"
    ended = poll(client, begin(client).id)
    assert (ended.status, ended.error.code) == ("failed", "server_error")
    assert ended.error.message


def test_one_that_is_refused_leaves_nothing(background: Any) -> None:
    server, client = background
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.responses.create(model="gpt-9", input="hi", background=True)
    assert server.call(server.engine.object_store._call(lambda database: database.totals())) == (0, 0)
    assert server.context.num_running == 0


def test_a_cancelled_one_ends_and_can_be_cancelled_again(background: Any) -> None:
    server, client = background
    server.engine.script_end = None
    server.engine.step_seconds = 0.001
    begun = begin(client)
    wait_until(lambda: server.engine.num_said > 15)
    assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
    cancelled = client.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    assert cancelled.output_text.startswith("Hello, world")
    assert server.engine.cancelled == [(0, "owner")]
    for call in (client.responses.cancel, client.responses.retrieve, client.responses.cancel):
        assert call(begun.id) == cancelled
    server.engine.script_end = "eos"
    done = poll(client, begin(client).id)
    assert client.responses.cancel(done.id) == done


def test_only_one_in_the_background_can_be_cancelled(background: Any) -> None:
    server, client = background
    response = client.responses.create(model="test", input="hi")
    reply = server.request("POST", f"/v1/responses/{response.id}/cancel")
    assert_error(reply, 400, INVALID, message="created with 'background'")


def test_a_deleted_one_ends_and_does_not_come_back(background: Any) -> None:
    server, client = background
    server.engine.script_end = None
    server.engine.step_seconds = 0.001
    begun = begin(client)
    client.responses.delete(begun.id)
    wait_until(lambda: server.context.num_running == 0)
    assert server.engine.cancelled == [(0, "owner")]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def test_the_events_of_a_stream(background: Any) -> None:
    _, client = background
    events = list(begin(client, stream=True))
    assert numbers(events) == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == ["response.created", "response.queued", "response.in_progress", "response.output_item.added"]
    assert types[-1] == "response.completed"
    assert [event.response.status for event in (*events[:3], events[-1])] == [
        "queued",
        "queued",
        "in_progress",
        "completed",
    ]
    # It is kept before the last event is sent.
    assert client.responses.retrieve(events[0].response.id) == events[-1].response


@pytest.mark.parametrize("settings", [{}, {"resume_seconds": 60}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_goes_on_after_any_event(start_with_client: StartWithClient, stream: bool, settings: Any) -> None:
    _, client = start_with_client(**settings)
    if stream:
        events = list(begin(client, stream=True))
    else:
        events = list(client.responses.retrieve(poll(client, begin(client).id).id, stream=True))
    id = events[0].response.id
    assert len(events) > 15
    assert list(client.responses.retrieve(id, stream=True)) == events
    for event in events:
        rest = list(client.responses.retrieve(id, stream=True, starting_after=event.sequence_number))
        assert rest == events[event.sequence_number + 1 :]


def test_the_helper_for_streams_reads_one_again(background: Any) -> None:
    server, client = background
    with client.responses.stream(model="test", input="hi", background=True) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert response.output_text == "Hello, world"
    with client.responses.stream(response_id=response.id, starting_after=5) as again:
        assert [event.sequence_number for event in again] == [event.sequence_number for event in events[6:]]
        assert again.get_final_response() == response
    assert len(server.engine.requests) == 1


def test_a_client_that_left_reads_on_while_it_is_generated(background: Any) -> None:
    server, client = background
    with held(server, after=5):
        with begin(client, stream=True) as stream:
            first = list(islice(stream, 6))
        id = first[0].response.id
        with client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number) as again:
            second = [next(again)]
            server.engine.most_said = float("inf")
            second += again
    assert numbers(first + second) == list(range(len(first + second)))
    text = "".join(event.delta for event in first + second if event.type == "response.output_text.delta")
    assert (text, second[-1].type) == ("Hello, world", "response.completed")
    assert second[-1].response == client.responses.retrieve(id)
    assert server.engine.cancelled == []


def test_a_client_knows_the_id_before_anything_is_generated(background: Any) -> None:
    server, client = background
    with held(server), begin(client, stream=True) as stream:
        assert [next(stream).type for _ in range(2)] == ["response.created", "response.queued"]


def test_a_second_reader_ends_the_first(background: Any) -> None:
    server, client = background
    with held(server, after=5), begin(client, stream=True) as first:
        id = next(first).response.id
        with client.responses.retrieve(id, stream=True) as second:
            assert next(second).response.id == id
            *_, before, last = first
            assert (last.type, last.code) == ("error", "taken_over")
            assert "continued on another connection" in last.message
            # The client of the first may go on after it.
            assert last.sequence_number == before.sequence_number
            server.engine.most_said = float("inf")
            assert list(second)[-1].type == "response.completed"


def test_a_reader_that_is_ended_before_its_first_event_keeps_its_place(background: Any) -> None:
    server, client = background
    with held(server, after=5), begin(client, stream=True) as stream:
        id = next(stream).response.id
        with (
            client.responses.retrieve(id, stream=True, starting_after=500) as first,
            client.responses.retrieve(id, stream=True) as second,
        ):
            next(second)
            [last] = first
            assert (last.code, last.sequence_number) == ("taken_over", 500)


def test_a_cancelled_stream_ends(background: Any) -> None:
    server, client = background
    with held(server, after=5), begin(client, stream=True) as stream:
        id = next(stream).response.id
        assert client.responses.cancel(id).status == "cancelled"
        *_, error, failed = stream
        assert (error.type, error.code) == ("error", "cancelled")
        assert failed.response == client.responses.retrieve(id)
    # Its events are no longer kept.
    reply = server.request("GET", f"/v1/responses/{id}?stream=true")
    assert_error(reply, 409, INVALID, "stream", message="retrieve it without 'stream'")
    assert reply.headers["x-should-retry"] == "false"


def test_events_that_are_no_longer_kept_are_a_409(start_with_client: StartWithClient) -> None:
    server, client = start_with_client(resume_memory="1KiB")
    ended = poll(client, begin(client).id)
    assert ended.output_text == "Hello, world"
    reply = server.request("GET", f"/v1/responses/{ended.id}?stream=true")
    assert_error(reply, 409, INVALID, "stream", message="retrieve it without 'stream'")


def test_a_conversation_is_locked_until_the_end(background: Any) -> None:
    server, client = background
    conversation = client.conversations.create()
    with held(server, after=5):
        begun = begin(client, conversation=conversation.id)
        with pytest.raises(openai.BadRequestError, match="Another process") as error:
            begin(client, conversation=conversation.id)
        assert error.value.code == "conversation_locked"
    poll(client, begun.id)
    assert len(client.conversations.items.list(conversation.id).data) == 2
    wait_until(lambda: not _holds(server))
    poll(client, begin(client, conversation=conversation.id).id)


def test_a_cancelled_one_is_not_in_its_conversation(background: Any) -> None:
    server, client = background
    conversation = client.conversations.create()
    with held(server, after=5):
        client.responses.cancel(begin(client, conversation=conversation.id).id)
    wait_until(lambda: not _holds(server))
    assert client.conversations.items.list(conversation.id).data == []
    client.responses.create(model="test", input="hi", conversation=conversation.id)


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_cannot_be_in_its_conversation_has_failed(background: Any, stream: bool) -> None:
    server, client = background
    conversation = client.conversations.create()
    item = {"id": "msg_mine", "role": "user", "content": "hi"}
    with held(server, after=5):
        begun = begin(client, [item], conversation=conversation.id, stream=stream)
        id = next(begun).response.id if stream else begun.id
        client.conversations.items.create(conversation.id, items=[{**item, "content": "first"}])
    found = poll(client, id)
    assert (found.status, found.output_text, found.completed_at) == ("failed", "Hello, world", None)
    assert (found.error.code, found.error.message.split(".")[0]) == (
        "invalid_prompt",
        "Duplicate item found with id msg_mine",
    )
    if stream:
        *_, error, failed = begun
        assert (error.type, failed.type, failed.response) == ("error", "response.failed", found)
    assert [each.id for each in client.conversations.items.list(conversation.id)] == ["msg_mine"]
    wait_until(lambda: not _holds(server))


def test_a_drain_waits_for_it(background: Any) -> None:
    server, client = background
    with held(server, after=5):
        begun = begin(client)
        draining = asyncio.run_coroutine_threadsafe(server._server.drain(asyncio.Event()), server.loop)
        assert server.context.num_running == 1
        assert not draining.done()
        assert client.responses.retrieve(begun.id).status != "completed"
    draining.result(PATIENCE_SECONDS)
    assert client.responses.retrieve(begun.id).output_text == "Hello, world"


def test_a_drain_that_takes_too_long_ends_it(start_with_client: StartWithClient) -> None:
    server, client = start_with_client(drain_seconds=0)
    with held(server, after=5):
        begun = begin(client)
        server.call(server._server.drain(asyncio.Event()))
        ended = client.responses.retrieve(begun.id)
    assert (ended.status, ended.error.code) == ("failed", "server_error")


def test_one_whose_process_has_died_has_failed(background: Any) -> None:
    server, client = background
    with held(server, after=5):
        begun = begin(client)
        server.loop.call_soon_threadsafe(server.engine.object_store.end_holds, 0)
        failed = wait_until(
            lambda: found if (found := client.responses.retrieve(begun.id)).status == "failed" else None
        )
        assert failed.error.code == "server_error"
        assert "has ended" in failed.error.message
        # Cancelling what is over changes nothing.
        assert client.responses.cancel(begun.id) == failed
        client.responses.delete(begun.id)


def test_one_that_cannot_be_kept_at_its_end_has_failed(background: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = background
    with held(server, after=5):
        begun = begin(client)
        server.call(server.engine.object_store._call(lambda database: database._execute("PRAGMA query_only = 1")))
        monkeypatch.setattr("eventlm.server.responses.retrieval.KEPT_SECONDS", 0.05)
    failed = poll(client, begun.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert server.context.num_running == 0
    server.call(server.engine.object_store._call(lambda database: database._execute("PRAGMA query_only = 0")))
    assert_serves(server)
