"""`/v1/batches` by the official client: from the upload to the results, and everything that can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.worker.fake.extras import FAKE_EMBEDDING_SIZE
from tests.processes import wait_until
from tests.server.batches.input_files import CHAT, chat_line, contents, create, jsonl, results, upload, wait_for
from tests.server.conftest import RunningServer, assert_serves

Start = Callable[..., tuple[RunningServer, openai.OpenAI]]
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice"

[[keys]]
name = "bob"
key = "sk-bob"
"""


KIND_OF_REPLY = {"/v1/completions": "text_completion", "/v1/embeddings": "list", "/v1/responses": "response"}


@pytest.fixture
def start(start_with_client: Start, tmp_path: Path) -> Start:
    return lambda **settings: start_with_client(
        **{"batch_dir": str(tmp_path / "batches"), "batch_window": 8} | settings
    )


def write_keys(folder: Path, text: str = KEYS) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_batch_from_its_file_to_its_results(start: Start) -> None:
    server, client = start()
    made = client.batches.create(
        input_file_id=upload(client, *(chat_line(f"r{number}") for number in range(20))),
        endpoint=CHAT,
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    assert (made.status, made.metadata, made.endpoint) == ("validating", {"job": "nightly"}, CHAT)
    assert made.expires_at == made.created_at + 86_400
    batch = wait_for(client, made.id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)
    lines = results(client, batch.output_file_id)
    assert contents(lines) == {f"r{number}": "Hello, world" for number in range(20)}
    assert {line["response"]["status_code"] for line in lines} == {200}
    usages = [line["response"]["body"]["usage"] for line in lines]
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert batch.usage.input_tokens_details.cached_tokens == 20 * 4
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(output.id).content)
    assert [file.id for file in client.files.list(purpose="batch_output")] == [output.id]
    # As any other request, it can be looked up.
    request_id = next(line["response"]["request_id"] for line in lines if line["custom_id"] == "r7")
    assert request_id == f"{batch.id}/r7"
    assert server.request("GET", f"/v1/requests/{request_id}/explain").status == 200


def test_one_bad_line_among_a_thousand_fails_by_its_number(start: Start) -> None:
    _, client = start(batch_window=100)
    lines: list[Any] = [chat_line(f"r{number}") for number in range(1, 1001)]
    lines[416] = b'{"custom_id": "r417", "method"'
    batch = wait_for(client, create(client, *lines))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 1000, "completed": 999, "failed": 1}
    assert len(contents(results(client, batch.output_file_id))) == 999
    [bad] = results(client, batch.error_file_id)
    assert (bad["response"], bad["error"]["code"], bad["error"]["line"]) == (None, "invalid_json_line", 417)
    assert bad["error"]["message"].startswith("Line 417: it is not valid JSON")


def test_each_line_fails_for_itself(start: Start) -> None:
    """With what the endpoint would have answered, or with why it was not asked."""
    server, client = start()
    server.context.num_slots = 100
    lines = [
        chat_line("good"),
        chat_line("model", model="nope"),
        chat_line("field", temperature=9),
        chat_line("stream", stream=True),
        chat_line("long", messages=[{"role": "user", "content": "x" * 9000}]),
        chat_line("good"),
        chat_line("url", url="/v1/completions"),
        chat_line("urgent", priority=-5, deadline_ms=1, drop_if_late=True, slo={"ttft_ms": 1}),
        chat_line("many", n=100),
        chat_line("too many", n=128),
    ]
    batch = wait_for(client, create(client, *lines))
    assert batch.status == "completed"
    assert {line["custom_id"] for line in results(client, batch.output_file_id)} == {"good", "urgent", "many"}
    errors = results(client, batch.error_file_id)
    answered = {
        line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]["error"]["param"])
        for line in errors
        if line["response"] is not None
    }
    assert answered == {
        "model": (404, "model"),
        "field": (400, "temperature"),
        "stream": (400, "stream"),
        "long": (400, "messages"),
        "too many": (400, "messages"),
    }
    [message] = [line["response"]["body"]["error"]["message"] for line in errors if line["custom_id"] == "too many"]
    assert "has 128 sequences at once" in message
    assert "at most 100" in message
    refused = {(line["error"]["line"], line["error"]["code"]) for line in errors if line["error"] is not None}
    assert refused == {(6, "duplicate_custom_id"), (7, "mismatched_endpoint")}


def test_every_endpoint_that_generates(start: Start) -> None:
    _, client = start()
    bodies = {
        "/v1/completions": {"model": "test", "prompt": "hi"},
        "/v1/embeddings": {"model": "test", "input": ["a", "b"]},
        "/v1/responses": {"model": "test", "input": "hi"},
    }
    for endpoint, body in bodies.items():
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = wait_for(client, create(client, line, endpoint=endpoint))
        [found] = results(client, batch.output_file_id)
        reply = found["response"]["body"]
        num_tokens = reply["usage"].get("prompt_tokens") or reply["usage"]["input_tokens"]
        assert batch.usage.input_tokens == num_tokens > 0
        assert reply["object"] == KIND_OF_REPLY[endpoint]
        if endpoint == "/v1/embeddings":
            assert [(each["object"], each["index"]) for each in reply["data"]] == [("embedding", 0), ("embedding", 1)]
            assert {len(each["embedding"]) for each in reply["data"]} == {FAKE_EMBEDDING_SIZE}


def test_responses_are_kept_if_lines_ask_for_it(start: Start) -> None:
    _, client = start()
    bodies: dict[str, Any] = {
        "kept": {"store": True},
        "not": {},
        "late": {"background": True},
        "live": {"stream": True},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {"model": "test", "input": "hi"} | more}
        for name, more in bodies.items()
    ]
    batch = wait_for(client, create(client, *lines, endpoint="/v1/responses"))
    ids = {line["custom_id"]: line["response"]["body"]["id"] for line in results(client, batch.output_file_id)}
    assert client.responses.retrieve(ids["kept"]).output_text == "Hello, world"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids["not"])
    refused = {
        line["custom_id"]: line["response"]["body"]["error"]["param"] for line in results(client, batch.error_file_id)
    }
    assert refused == {"late": "background", "live": "stream"}


def test_lines_have_the_lowest_priority_and_no_deadlines(start: Start) -> None:
    server, client = start()
    line = chat_line("a", priority=-7, deadline_ms=5, drop_if_late=True, slo={"ttft_ms": 5, "tpot_ms": 5})
    assert wait_for(client, create(client, line)).status == "completed"
    [request] = server.engine.requests
    scheduling = request.scheduling
    assert scheduling.priority == 2**31 - 1
    assert (scheduling.deadline_ns, scheduling.slo_ttft_ns, scheduling.slo_tpot_ns) == (0, 0, 0)
    assert not scheduling.drop_if_late


#: Input, the number and code of each error of the batch.
NOTHING_TO_RUN: list[tuple[bytes, list[tuple[int | None, str]]]] = [
    (b"", [(None, "empty_file")]),
    (b"\n\n  \n", [(None, "empty_file")]),
    (b"x\ny\n", [(1, "invalid_json_line"), (2, "invalid_json_line")]),
    (jsonl(chat_line("a", url="/v1/completions")), [(1, "mismatched_endpoint")]),
    (jsonl(*(chat_line(f"{number}") for number in range(6))), [(6, "too_many_lines")]),
]


@pytest.mark.parametrize(("data", "errors"), NOTHING_TO_RUN)
def test_a_file_of_which_nothing_can_be_run_fails(start: Start, data: bytes, errors: list[tuple[int, str]]) -> None:
    server, client = start(batch_max_lines=5)
    file_id = client.files.create(file=data, purpose="batch").id
    made = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    batch = wait_for(client, made.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert [(error.line, error.code) for error in batch.errors.data] == errors
    assert server.engine.requests == []


#: Fields of a new batch, the status and the param of the error.
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"input_file_id": "file-1"}, 404, "input_file_id"),
    ({"input_file_id": 7}, 400, "input_file_id"),
    ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
    ({"endpoint": "/health"}, 400, "endpoint"),
    ({"completion_window": "1h"}, 400, "completion_window"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
def test_a_batch_that_is_refused(start: Start, fields: dict[str, Any], status: int, param: str) -> None:
    server, client = start()
    body = {"input_file_id": upload(client, chat_line("a")), "endpoint": CHAT, "completion_window": "24h"}
    reply = server.post("/v1/batches", body | fields)
    assert (reply.status, reply.json()["error"]["param"]) == (status, param), reply.data
    assert client.batches.list().data == []


def test_the_output_of_a_batch_is_no_input(start: Start) -> None:
    _, client = start()
    batch = wait_for(
        client, create(client, chat_line("a"), output_expires_after={"anchor": "created_at", "seconds": 3600})
    )
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        client.batches.create(input_file_id=output.id, endpoint=CHAT, completion_window="24h")


def test_a_cancelled_batch_keeps_what_is_done(start: Start) -> None:
    server, client = start(batch_window=2)
    server.engine.most_said = 5 * len("Hello, world") + 3
    batch_id = create(client, *(chat_line(f"r{number}") for number in range(50)))
    wait_until(lambda: server.engine.num_said == server.engine.most_said)
    asked = client.batches.cancel(batch_id)
    assert (asked.status, asked.cancelling_at is not None) == ("cancelling", True)
    batch = wait_for(client, batch_id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at >= batch.created_at
    lines = results(client, batch.output_file_id)
    assert len(lines) == batch.request_counts.completed
    assert 4 <= len(lines) <= 5
    assert batch.request_counts.total == 50
    # What was under way is ended, and nothing follows.
    assert len(server.engine.cancelled_by) == len(server.engine.requests) - len(lines)
    assert len(server.engine.requests) <= 7
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
        client.batches.cancel(batch_id)
    server.engine.most_said = 10**9
    assert_serves(server)


def test_a_batch_that_waits_for_another_can_be_cancelled(start: Start) -> None:
    server, client = start()
    server.engine.most_said = 0
    first, second = (create(client, chat_line(name)) for name in "ab")
    wait_for(client, second, "in_progress")
    client.batches.cancel(second)
    assert wait_for(client, second).status == "cancelled"
    assert client.batches.retrieve(first).status == "in_progress"
    server.engine.most_said = 10**9
    assert wait_for(client, first).status == "completed"


def test_batches_are_listed_the_newest_first(start: Start) -> None:
    _, client = start(batch_max_objects=5)
    file_id = upload(client, chat_line("a"))
    fields: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    ids = [client.batches.create(**fields).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    page = client.batches.list(limit=2, after=ids[3])
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[2], ids[1]], True)
    with pytest.raises(openai.BadRequestError, match="limit must be at most 100"):
        client.batches.list(limit=101)


def test_only_batches_that_are_not_over_are_limited_and_the_oldest_others_go(start: Start) -> None:
    server, client = start(batch_max_objects=3)
    file_id = upload(client, chat_line("a"))
    fields: Any = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    done = [wait_for(client, client.batches.create(**fields).id).id for _ in range(3)]
    server.engine.most_said = 0
    running = [client.batches.create(**fields).id for _ in range(2)]
    assert [batch.id for batch in client.batches.list()] == [*running[::-1], done[2]]
    running.append(client.batches.create(**fields).id)
    with pytest.raises(openai.RateLimitError, match="has 3 batches that are not over"):
        client.batches.create(**fields)
    assert [batch.id for batch in client.batches.list()] == running[::-1]
    server.engine.most_said = 10**9
    assert {wait_for(client, batch_id).status for batch_id in running} == {"completed"}


def test_another_keys_files_and_batches_are_unknown(start: Start, tmp_path: Path) -> None:
    _, client = start(api_keys_file=write_keys(tmp_path))
    alice, bob = (client.with_options(api_key=f"sk-{name}") for name in ("alice", "bob"))
    batch = wait_for(alice, create(alice, chat_line("a")))
    assert batch.status == "completed"
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert (bob.files.list().data, bob.batches.list().data) == ([], [])
    assert len(alice.files.list().data) == 2
    with pytest.raises(openai.AuthenticationError):
        client.batches.list()


@pytest.mark.parametrize("name", ["batch_1", "..%2f..%2fetc", "batch_" + "g" * 32])
def test_an_unknown_batch(start: Start, name: str) -> None:
    server, _ = start()
    assert server.request("GET", f"/v1/batches/{name}").status == 404
    assert server.request("POST", f"/v1/batches/{name}/cancel").status == 404
