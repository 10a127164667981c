"""Responses that are kept: retrieved, listed, deleted, bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell

StartWithClient = Callable[..., tuple[RunningServer, Any]]


def create(client: Any, input: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model="test", input=input, **fields)


def is_kept(client: Any, id: str) -> bool:
    try:
        client.responses.retrieve(id)
    except openai.NotFoundError:
        return False
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_kept_as_its_client_got_it(start_with_client: StartWithClient, stream: bool) -> None:
    _, client = start_with_client()
    found = create(client, metadata={"a": "b"}, max_output_tokens=5, stream=stream)
    response = list(found)[-1].response if stream else found
    assert (response.status, response.store) == ("incomplete", True)
    assert client.responses.retrieve(response.id) == response
    assert client.responses.retrieve(response.id, include=["message.output_text.logprobs"]) == response


def test_a_deleted_response_is_gone(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    response = create(client)
    reply = server.request("DELETE", f"/v1/responses/{response.id}")
    assert reply.json() == {"id": response.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{response.id}' not found."):
            call(response.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        create(client, previous_response_id=response.id)


def test_input_items_are_those_the_model_was_given(start_with_client: StartWithClient) -> None:
    _, client = start_with_client()
    first = create(client, "What is your name?")
    [item] = client.responses.input_items.list(first.id).data
    assert item.to_dict() == {
        "id": item.id,
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "What is your name?"}],
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_time", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
    second = create(client, [call, output], previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [each.type for each in items] == ["message", "message", "function_call", "function_call_output"]
    assert [each.id for each in items[:3]] == [item.id, first.output[0].id, "fc_1"]
    assert items[3].id.startswith("fco_")


def test_input_items_come_in_pages(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    response = create(client, [{"role": "user", "content": str(number)} for number in range(23)])
    pages = list(client.responses.input_items.list(response.id, limit=10, order="asc").iter_pages())
    assert [len(page.data) for page in pages] == [10, 10, 3]
    ids = [item.id for page in pages for item in page.data]
    assert len(set(ids)) == 23
    newest = server.request("GET", f"/v1/responses/{response.id}/input_items").json()
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (ids[:2:-1], True)
    assert (newest["object"], newest["first_id"], newest["last_id"]) == ("list", ids[-1], ids[3])
    oldest = client.responses.input_items.list(response.id, after=ids[3])
    assert ([item.id for item in oldest.data], oldest.has_more) == ([*ids[2::-1]], False)


def test_the_oldest_responses_go_when_there_are_too_many(start_with_client: StartWithClient) -> None:
    _, client = start_with_client(max_responses=3)
    ids = [create(client).id for _ in range(5)]
    assert [is_kept(client, id) for id in ids] == [False, False, True, True, True]


def test_the_oldest_responses_go_when_there_are_too_many_bytes(start_with_client: StartWithClient) -> None:
    server, client = start_with_client(response_memory="20KiB")
    ids = [create(client, "x" * 1000).id for _ in range(20)]
    num_kept = [is_kept(client, id) for id in ids].count(True)
    assert 3 < num_kept < 15
    assert all(is_kept(client, id) for id in ids[-num_kept:])
    assert server.call(server.engine.object_store._call(lambda database: database.totals()))[1] <= 20 * 1024


def test_a_response_that_is_larger_than_the_store_is_an_error(start_with_client: StartWithClient) -> None:
    _, client = start_with_client(response_memory="3KiB")
    for fields in ({}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match=r"too large to be kept: .* 'store': false"):
            create(client, "x" * 3000, **fields)
    with create(client, "x" * 3000, stream=True) as stream:
        assert [event.type for event in stream][-2:] == ["error", "response.failed"]
    assert create(client, "x" * 3000, store=False).status == "completed"


def test_a_response_is_kept_for_a_time(start_with_client: StartWithClient) -> None:
    server, client = start_with_client(response_seconds=60)
    id = create(client).id
    assert is_kept(client, id)
    server.call(server.engine.object_store._call(_make_older))
    assert not is_kept(client, id)


def _make_older(database: Any) -> None:
    database._execute("UPDATE object SET changed_ns = changed_ns - 60000000000")


def test_responses_outlive_a_restart_in_a_file(start_with_client: StartWithClient, tmp_path: Path) -> None:
    server, client = start_with_client(response_store=str(tmp_path / "store"))
    response = create(client, "What is your name?")
    conversation = client.conversations.create(items=[{"role": "user", "content": "Hello"}])
    server.call(server.engine.object_store.close())
    server, client = start_with_client(response_store=str(tmp_path / "store"))
    assert client.responses.retrieve(response.id) == response
    assert len(client.conversations.items.list(conversation.id).data) == 1
    create(client, "And yours?", previous_response_id=response.id)
    assert len(server.engine.requests[0].prompt_token_ids) > 60


def test_a_store_that_fails_is_a_503_and_the_server_lives_on(
    start_with_client: StartWithClient, tmp_path: Path
) -> None:
    server, client = start_with_client(response_store=str(tmp_path / "store"))
    kept = create(client)
    # A file that cannot grow is a disk that is full.
    server.call(server.engine.object_store._call(lambda database: database._execute("PRAGMA max_page_count = 1")))
    reply = server.post("/v1/responses", {"model": "test", "input": "x" * 2000})
    assert_error(reply, 503, "server_error", message="The server's store of responses cannot be used: ")
    assert reply.headers["retry-after"]
    with create(client, "x" * 2000, stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events][-2:] == ["error", "response.failed"]
    assert events[-1].response.error.code == "server_error"
    assert create(client, "x" * 2000, store=False).status == "completed"
    server.call(server.engine.object_store._call(lambda database: database._execute("PRAGMA max_page_count = 10000")))
    assert is_kept(client, kept.id)
    assert is_kept(client, create(client).id)


def test_another_keys_response_does_not_exist(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "of-a"\n[[keys]]\nname = "b"\nkey = "of-b"\n')
    keys.chmod(0o600)
    server = start_server(api_keys_file=str(keys))
    mine, other = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("of-a", "of-b"))
    with mine, other:
        response = create(mine, background=True)
        calls: list[Callable[[Any], Any]] = [
            lambda client: client.responses.retrieve(response.id),
            lambda client: client.responses.input_items.list(response.id),
            lambda client: list(client.responses.retrieve(response.id, stream=True)),
            lambda client: client.responses.cancel(response.id),
            lambda client: client.responses.delete(response.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{response.id}' not found."):
                call(other)
        with pytest.raises(openai.BadRequestError, match="Previous response"):
            create(other, previous_response_id=response.id)
        [item] = mine.responses.input_items.list(response.id).data
        with pytest.raises(openai.APIStatusError, match="no item has the id"):
            create(other, [{"type": "item_reference", "id": item.id}])
        for call in calls[1:]:
            call(mine)


@pytest.mark.parametrize(
    ("query", "param", "code", "message"),
    [
        ("?stream=maybe", "stream", "invalid_type", "bool"),
        ("?stream=true", "stream", "invalid_value", "created with 'background'"),
        ("?starting_after=3", "starting_after", "invalid_value", "give 'stream=true' too"),
        ("?stream=true&starting_after=-1", "starting_after", "invalid_value", "at least 0"),
        ("?stream=true&starting_after=x", "starting_after", "invalid_type", "int"),
        ("/input_items?limit=101", "limit", "invalid_value", "at most 100"),
        ("/input_items?order=newest", "order", "invalid_value", "supported values are 'asc', 'desc'"),
        ("/input_items?after=msg_9", "after", "invalid_value", "there is no item 'msg_9' in this list"),
    ],
)
def test_what_is_wrong_in_a_query_is_named(
    server: RunningServer, query: str, param: str, code: str, message: str
) -> None:
    id = server.post("/v1/responses", {"model": "test", "input": "hi"}).json()["id"]
    assert_error(server.request("GET", f"/v1/responses/{id}{query}"), 400, INVALID, param, code, message)


def test_unknown_ids_are_a_404(server: RunningServer) -> None:
    for method, path in [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
    ]:
        reply = server.request(method, f"/v1/responses/resp_1{path}")
        assert_error(reply, 404, INVALID, message="Response with id 'resp_1' not found.")


def test_a_head_does_not_take_a_stream(server: RunningServer) -> None:
    id = server.post("/v1/responses", {"model": "test", "input": "hi", "background": True}).json()["id"]
    reply = server.request("HEAD", f"/v1/responses/{id}?stream=true")
    assert (reply.status, reply.data) == (200, b"")
    assert reply.headers["content-type"].startswith("application/json")


def test_a_large_response_comes_back_whole(start_with_client: StartWithClient) -> None:
    server, client = start_with_client()
    server.engine.script = spell("x" * 3000, width=100)
    response = create(client, "y" * 500)
    raw = server.request("GET", f"/v1/responses/{response.id}").data
    assert json.loads(raw)["output"][0]["content"][0]["text"] == "x" * 3000
