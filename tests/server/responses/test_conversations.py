"""`/v1/conversations` with the client of the openai package, and what it does not send."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error

USER = {"type": "message", "role": "user", "content": "Hello"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_time", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "It is noon.", "annotations": []}]}

StartWithClient = Callable[..., tuple[RunningServer, Any]]


def test_a_conversation_from_its_beginning_to_its_end(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    created = client.conversations.create(metadata={"topic": "time"}, items=[USER])
    assert created.id.startswith("conv_")
    assert (created.object, created.metadata) == ("conversation", {"topic": "time"})
    assert client.conversations.retrieve(created.id) == created
    updated = client.conversations.update(created.id, metadata={"topic": "noon", "owner": "me"})
    assert updated.metadata == {"topic": "noon", "owner": "me"}
    assert client.conversations.retrieve(created.id) == updated
    assert [item.role for item in client.conversations.items.list(created.id)] == ["user"]
    deleted = client.conversations.delete(created.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (created.id, "conversation.deleted", True)
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{created.id}' not found."):
            call(created.id)


def test_an_empty_conversation(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    created = client.conversations.create()
    assert created.metadata == {}
    assert client.conversations.items.list(created.id).data == []
    page = server.request("GET", f"/v1/conversations/{created.id}/items").json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_items_of_every_kind_come_back_as_they_are_shown(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create()
    created = client.conversations.items.create(conversation.id, items=[USER, REASONING, CALL, OUTPUT, ANSWER])
    shown = [item.to_dict() for item in created.data]
    ids = [item.pop("id") for item in shown]
    assert [id.partition("_")[0] for id in ids] == ["msg", "rs", "fc", "fco", "msg"]
    assert len(set(ids)) == 5
    assert (created.first_id, created.last_id, created.has_more) == (ids[0], ids[-1], False)
    assert shown == [
        USER | {"content": [{"type": "input_text", "text": "Hello"}], "status": "completed"},
        REASONING | {"status": "completed"},
        CALL | {"status": "completed"},
        OUTPUT | {"status": "completed"},
        ANSWER | {"type": "message", "status": "completed"},
    ]
    for id, item in zip(ids, created.data, strict=True):
        assert client.conversations.items.retrieve(id, conversation_id=conversation.id) == item
    assert [item.id for item in client.conversations.items.list(conversation.id, order="asc")] == ids


def test_items_come_in_pages(start_with_client: StartWithClient) -> None:
    _server, client = start_with_client()
    conversation = client.conversations.create()
    for _ in range(3):
        client.conversations.items.create(conversation.id, items=[USER] * 7)
    pages = client.conversations.items.list(conversation.id, limit=4, order="asc").iter_pages()
    sizes, ids = [], []
    for page in pages:
        sizes.append(len(page.data))
        ids += [item.id for item in page.data]
    assert sizes == [4] * 5 + [1]
    assert len(set(ids)) == 21
    newest = client.conversations.items.list(conversation.id)
    assert [item.id for item in newest.data] == ids[:0:-1]
    assert newest.has_more
    before = client.conversations.items.list(conversation.id, after=ids[2]).data
    assert [item.id for item in before] == [ids[1], ids[0]]


def test_a_reference_adds_the_item_that_it_stands_for(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    response = client.responses.create(model="test", input="hi")
    [said] = response.output
    reference = {"type": "item_reference", "id": said.id}
    conversation = client.conversations.create(items=[USER, reference])
    assert (
        client.conversations.items.retrieve(said.id, conversation_id=conversation.id).content[0].text
        == said.content[0].text
    )
    for item, param in (({"id": "msg_none"}, "items[0].id"), ({"type": "item_reference"}, "items[0].id")):
        reply = server.post(f"/v1/conversations/{conversation.id}/items", {"items": [item]})
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_an_item_can_be_deleted(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create(items=[USER, ANSWER])
    newer, older = client.conversations.items.list(conversation.id).data
    assert client.conversations.items.delete(older.id, conversation_id=conversation.id) == conversation
    assert [item.id for item in client.conversations.items.list(conversation.id)] == [newer.id]
    for call in (client.conversations.items.delete, client.conversations.items.retrieve):
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{older.id}' not found in conversation"):
            call(older.id, conversation_id=conversation.id)


def test_an_item_cannot_be_there_twice(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create(items=[USER | {"id": "msg_1"}])
    for items in ([USER | {"id": "msg_1"}], [USER | {"id": "msg_2"}, ANSWER | {"id": "msg_2"}]):
        with pytest.raises(openai.BadRequestError, match="Duplicate item found with id msg_") as error:
            client.conversations.items.create(conversation.id, items=items)
        assert error.value.param == "input"
    assert [item.id for item in client.conversations.items.list(conversation.id)] == ["msg_1"]


def keyed(server: RunningServer, key: str) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_another_keys_conversation_does_not_exist(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "of-a"\n[[keys]]\nname = "b"\nkey = "of-b"\n')
    keys.chmod(0o600)
    server = start_server(api_keys_file=str(keys))
    with keyed(server, "of-a") as mine, keyed(server, "of-b") as other:
        conversation = mine.conversations.create(items=[USER])
        [item] = mine.conversations.items.list(conversation.id).data
        calls: list[Callable[[Any], Any]] = [
            lambda client: client.conversations.retrieve(conversation.id),
            lambda client: client.conversations.update(conversation.id, metadata={}),
            lambda client: client.conversations.items.list(conversation.id),
            lambda client: client.conversations.items.create(conversation.id, items=[USER]),
            lambda client: client.conversations.items.retrieve(item.id, conversation_id=conversation.id),
            lambda client: client.conversations.items.delete(item.id, conversation_id=conversation.id),
            lambda client: client.conversations.delete(conversation.id),
        ]
        messages = set()
        for call in calls:
            with pytest.raises(openai.NotFoundError) as error:
                call(other)
            messages.add(error.value.body["message"].replace(conversation.id, "ID").replace(item.id, "ITEM"))  # type: ignore[index]
        assert messages == {
            "Conversation with id 'ID' not found.",
            "Item with id 'ITEM' not found in conversation 'ID'.",
        }
        for call in calls:
            call(mine)


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "code", "message"),
    [
        ("POST", "", {"items": [USER] * 21}, "items", "invalid_value", "at most 20 items"),
        ("POST", "", {"items": "Hello"}, "items", "invalid_type", "array"),
        ("POST", "", {"metadata": {"a": 1}}, "metadata", "invalid_type", "str"),
        ("POST", "", {"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value", "at most 16"),
        ("POST", "/ID", {}, "metadata", "missing_required_parameter", "Missing required parameter: 'metadata'"),
        ("POST", "/ID/items", {}, "items", "missing_required_parameter", "Missing required parameter: 'items'"),
        ("GET", "/ID/items?limit=0", None, "limit", "invalid_value", "at least 1"),
        ("GET", "/ID/items?limit=101", None, "limit", "invalid_value", "at most 100"),
        ("GET", "/ID/items?limit=many", None, "limit", "invalid_type", "int"),
        ("GET", "/ID/items?order=up", None, "order", "invalid_value", "supported values are 'asc', 'desc'"),
        ("GET", "/ID/items?after=msg_9", None, "after", "invalid_value", "there is no item 'msg_9' in this list"),
    ],
)
def test_what_is_wrong_is_named(
    server: RunningServer, method: str, path: str, body: Any, param: str, code: str, message: str
) -> None:
    id = server.post("/v1/conversations", {}).json()["id"]
    data = None if body is None else json.dumps(body).encode()
    reply = server.request(
        method, f"/v1/conversations{path.replace('ID', id)}", data, {"Content-Type": "application/json"}
    )
    assert_error(reply, 400, INVALID, param, code, message)


def test_an_unknown_conversation_is_a_404(server: RunningServer) -> None:
    for method, path in [("GET", "conv_1"), ("DELETE", "conv_1"), ("GET", "conv_1/items"), ("GET", "resp_1")]:
        reply = server.request(method, f"/v1/conversations/{path}")
        assert_error(reply, 404, INVALID, message=f"Conversation with id '{path.partition('/')[0]}' not found.")
