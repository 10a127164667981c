"""What is read of earlier responses and conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell
from tests.server.responses.responding import respond
from tests.server.responses.test_turn import create, prompt

StartWithClient = Callable[..., tuple[RunningServer, Any]]


def test_what_is_not_stored_cannot_be_gone_on_with(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    response = create(client, store=False)
    assert not response.store
    for id in (response.id, "resp_0"):
        with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{id}' not found.") as error:
            create(client, previous_response_id=id)
        assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
    assert server.call(server.engine.object_store._call(lambda database: database.totals())) == (0, 0)


def test_a_reference_stands_for_an_item_that_is_kept(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    server.engine.script = spell("I am Bob.")
    first = create(client, "Who are you?")
    conversation = client.conversations.create(items=[{"role": "user", "content": "From the conversation."}])
    [item] = client.conversations.items.list(conversation.id).data
    reference = {"type": "item_reference", "id": first.output[0].id}
    second = create(client, [reference, {"id": item.id}, {"role": "user", "content": "Go on."}])
    said = prompt(server)
    assert said.index("I am Bob.") < said.index("From the conversation.") < said.index("Go on.")
    assert [each.id for each in client.responses.input_items.list(second.id, order="asc")][:2] == [
        first.output[0].id,
        item.id,
    ]
    client.responses.delete(first.id)
    # The second response has it too.
    create(client, [reference, {"role": "user", "content": "Go on."}])
    with pytest.raises(openai.APIStatusError, match="msg_none"):
        create(client, [{"type": "item_reference", "id": "msg_none"}])


def test_earlier_items_count_as_input_tokens(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    first = create(client, "Hello there")
    conversation = client.conversations.create(items=[{"role": "user", "content": "Hello there"}])
    alone = client.responses.input_tokens.count(model="test", input="hi").input_tokens
    for fields in ({"previous_response_id": first.id}, {"conversation": conversation.id}):
        assert client.responses.input_tokens.count(model="test", input="hi", **fields).input_tokens > alone + 10
    # Counting does not wait for a response.
    server.call(server.engine.objects.change("conversation", conversation.id, "", hold=True))
    client.responses.input_tokens.count(model="test", input="hi", conversation=conversation.id)


def test_a_conversation_has_more_items_than_a_page(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    conversation = client.conversations.create()
    for number in range(60):
        items = [{"role": "user", "content": f"<{number}/{index}>"} for index in range(20)]
        client.conversations.items.create(conversation.id, items=items)
    server.engine.max_model_len = 100_000
    create(client, "Bye.", conversation=conversation.id)
    said = prompt(server)
    assert [said.count(text) for text in ("<0/0>", "<49/19>", "<50/0>", "<59/19>", "Bye.")] == [1] * 5


def test_a_conversation_that_no_context_holds_is_refused(start_with_client: StartWithClient) -> None:
    _, client = start_with_client(max_body_bytes=2048)
    conversation = client.conversations.create()
    for _ in range(3):
        client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x" * 1000}])
    with pytest.raises(openai.BadRequestError, match="more than the 2,048 bytes that a request may have"):
        create(client, conversation=conversation.id)
    # It is not locked.
    with pytest.raises(openai.BadRequestError, match="more than the 2,048 bytes"):
        create(client, conversation=conversation.id)


@pytest.mark.parametrize(
    ("fields", "status", "param", "code", "message"),
    [
        (
            {"previous_response_id": "resp_1", "conversation": "conv_1"},
            400,
            "previous_response_id",
            "invalid_value",
            "cannot be used together",
        ),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", "previous_response_not_found", "'resp_1'"),
        ({"conversation": "conv_1"}, 404, None, None, "Conversation with id 'conv_1' not found."),
        ({"conversation": {"id": "conv_1"}}, 404, None, None, "Conversation with id 'conv_1' not found."),
        ({"conversation": 5}, 400, "conversation", "invalid_type", ""),
        ({"background": True, "store": False}, 400, "background", "invalid_value", "'background' needs 'store'"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    server: RunningServer, fields: Any, status: int, param: str | None, code: str | None, message: str
) -> None:
    assert_error(respond(server, **fields), status, INVALID, param, code, message)
    assert not server.engine.requests
