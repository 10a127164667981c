"""What responses have to do with earlier ones, by id or in a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.processes import wait_until
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell

StartWithClient = Callable[..., tuple[Any, Any]]


def prompt(server: RunningServer) -> str:
    """The prompt of the last request; tokens of the fake tokenizer are bytes."""
    return bytes(id for id in server.engine.requests[-1].prompt_token_ids if id < 256).decode()


def create(client: Any, input: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model="test", input=input, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_with_an_earlier_one(start_with_client: StartWithClient, stream: bool) -> None:
    server, client = start_with_client()

    def turn(input: Any, earlier: str | None = None) -> Any:
        found = create(client, input, previous_response_id=earlier, instructions="Be brief.", stream=stream)
        return list(found)[-1].response if stream else found

    first = turn("What is your name?")
    server.engine.script = spell("I am Bob.")
    second = turn("And yours?", first.id)
    assert second.previous_response_id == first.id
    once = prompt(server)
    assert once.index("What is your name?") < once.index("Hello, world") < once.index("And yours?")
    # Instructions are not carried over.
    assert once.count("Be brief.") == 1
    turn("Bye.", second.id)
    assert [prompt(server).count(text) for text in ("What is your name?", "Hello, world", "I am Bob.", "Bye.")] == [
        1
    ] * 4
    # A response can go on in two ways.
    turn("Hm.", first.id)
    assert "I am Bob." not in prompt(server)
    client.responses.delete(first.id)
    turn("Still there?", second.id)
    assert "What is your name?" in prompt(server)


def test_a_client_that_leaves_leaves_nothing(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    server.engine.script_end = None
    server.engine.step_seconds = 0.001
    conversation = client.conversations.create()
    with create(client, stream=True, conversation=conversation.id) as events:
        id = next(iter(events)).response.id
    wait_until(lambda: server.engine.cancelled)
    server.engine.script_end = "eos"
    server.call(server.engine.objects.get("conversation", conversation.id, "", wait_seconds=60))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(id)
    assert client.conversations.items.list(conversation.id).data == []
    create(client, conversation=conversation.id)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_stream_that_can_be_resumed_is_kept_although_its_client_left(
    start_with_client: StartWithClient, comes_back: bool
) -> None:
    server, client = start_with_client(resume_seconds=60)
    conversation = client.conversations.create()
    server.engine.most_said = 5
    with create(client, stream=True, conversation=conversation.id) as events:
        id = next(iter(events)).response.id
        if comes_back:
            connection = server.raw(f"GET /v1/stream/{id} HTTP/1.0\r\n\r\n".encode())
            *_, last = events
            assert (last.type, last.code) == ("error", "taken_over")
    wait_until(lambda: server.context._read_on)
    # Another one would not see this one's items.
    with pytest.raises(openai.BadRequestError, match="Another process is currently operating"):
        create(client, conversation=conversation.id)
    server.engine.most_said = 1000
    response = wait_until(lambda: retrieved(client, id))
    assert (response.status, response.output_text, len(response.output)) == ("completed", "Hello, world", 1)
    assert client.responses.retrieve(id) == response
    wait_until(lambda: not server.engine.object_store._holders)
    create(client, conversation=conversation.id)
    items = client.conversations.items.list(conversation.id).data[2:]
    assert [item.id for item in items] == [response.output[0].id, client.responses.input_items.list(id).data[0].id]
    if comes_back:
        with connection, connection.makefile("rb") as file:
            assert b"response.completed" in file.read()


def retrieved(client: Any, id: str) -> Any:
    """The response if it is kept."""
    try:
        return client.responses.retrieve(id)
    except openai.NotFoundError:
        return None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [lambda id: id, lambda id: {"id": id}])
def test_a_conversation_gets_the_items_of_its_responses(
    start_with_client: StartWithClient, stream: bool, form: Callable[[str], Any]
) -> None:
    server, client = start_with_client()
    conversation = client.conversations.create(
        items=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "I am Ann."}]
    )
    for text in ("Who am I?", "Sure?"):
        found = create(client, text, conversation=form(conversation.id), stream=stream)
        response = list(found)[-1].response if stream else found
        assert response.conversation.id == conversation.id
    said = prompt(server)
    assert said.index("I am Ann.") < said.index("Who am I?") < said.index("Hello, world") < said.index("Sure?")
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("developer", "Be brief."),
        ("user", "I am Ann."),
        ("user", "Who am I?"),
        ("assistant", "Hello, world"),
        ("user", "Sure?"),
        ("assistant", "Hello, world"),
    ]
    assert items[-1].id == response.output[0].id
    # What the response was made from is its own: it does not change with the conversation.
    assert [item.id for item in client.responses.input_items.list(response.id, order="asc")] == [
        item.id for item in items[:-1]
    ]
    client.conversations.items.delete(items[1].id, conversation_id=conversation.id)
    create(client, "And now?", conversation=conversation.id)
    assert "I am Ann." not in prompt(server)


def test_a_response_that_is_not_stored_is_in_its_conversation(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create()
    response = create(client, conversation=conversation.id, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert next(item.id for item in client.conversations.items.list(conversation.id)) == response.output[0].id


def test_one_response_at_a_time_goes_on_with_a_conversation(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    server.engine.script_end = None
    server.engine.step_seconds = 0.001
    conversation = client.conversations.create()
    with create(client, stream=True, conversation=conversation.id) as events:
        next(iter(events))
        with pytest.raises(openai.BadRequestError, match="Another process is currently operating") as error:
            create(client, conversation=conversation.id)
        assert (error.value.param, error.value.code) == ("conversation", "conversation_locked")


def test_a_request_that_is_refused_does_not_lock_its_conversation(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    conversation = client.conversations.create()
    for fields in ({"input": "x" * 10_000}, {"model": "gpt-9"}, {"input": [{"type": "computer_call"}]}):
        with pytest.raises(openai.APIStatusError):
            client.responses.create(**({"model": "test", "input": "hi", "conversation": conversation.id} | fields))
    server.engine.script_end = "error"
    with pytest.raises(openai.InternalServerError):
        create(client, conversation=conversation.id)
    server.engine.script_end = "eos"
    create(client, conversation=conversation.id)
    assert len(client.conversations.items.list(conversation.id).data) == 2


def test_an_item_cannot_be_in_a_conversation_twice(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create()
    first = create(client, [{"id": "msg_mine", "role": "user", "content": "hi"}], conversation=conversation.id)
    answer = first.output[0].to_dict()
    for item in (answer, {"id": "msg_mine", "role": "user", "content": "again"}):
        with pytest.raises(openai.BadRequestError, match=f"Duplicate item found with id {item['id']}") as error:
            create(client, [item, {"role": "user", "content": "go on"}], conversation=conversation.id)
        assert error.value.param == "input"
        with pytest.raises(openai.BadRequestError, match="Duplicate item"):
            create(client, [item, {"role": "user", "content": "go on"}], previous_response_id=first.id)
    # Sent again as a whole it is there once.
    create(client, [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "go on"}])


def test_items_with_an_empty_id_get_ids(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create()
    items = [{"id": "", "role": "user", "content": text} for text in ("one", "two")]
    create(client, items, conversation=conversation.id)
    ids = [item.id for item in client.conversations.items.list(conversation.id)]
    assert len(set(ids)) == 3
    assert all(ids)
