"""The events of streamed responses, as tables, and whole responses, which say the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from eventlm.engine.request import BY_OPERATOR, BY_OWNER, EngineUnavailableError
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.responses.responding import TOOLS, respond, streamed
from tests.server.tool_calls import CALL

SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}

BEGIN = ["response.created", "response.in_progress"]
MESSAGE = ["output_item.added message", "content_part.added output_text"]
MESSAGE_DONE = ["output_text.done", "content_part.done output_text", "output_item.done message"]
REASONING = ["output_item.added reasoning", "content_part.added reasoning_text"]
REASONING_DONE = ["reasoning_text.done", "content_part.done reasoning_text", "output_item.done reasoning"]
CALL_DONE = ["function_call_arguments.done", "output_item.done function_call"]

#: By case: what the model says, in two halves; fields of the body; and the events.
SEQUENCES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "plain text": ("Hello", {}, [*MESSAGE, "output_text.delta", "output_text.delta", *MESSAGE_DONE, "completed"]),
    "no text": ("", {}, [*MESSAGE, *MESSAGE_DONE, "completed"]),
    "reasoning, then text": (
        "<think>\nHm.\n</think>\n\nYes. ",
        {},
        [*REASONING, "reasoning_text.delta", *REASONING_DONE, *MESSAGE, "output_text.delta", *MESSAGE_DONE,
         "completed"],
    ),
    "a call": (
        SUM,
        {"tools": TOOLS},
        ["output_item.added function_call", "function_call_arguments.delta", *CALL_DONE, "completed"],
    ),
    "text, then a call": (
        f"Well, well, well, let me think about that for a while.\n{SUM}",
        {"tools": TOOLS},
        [*MESSAGE, "output_text.delta", "output_text.delta", *MESSAGE_DONE, "output_item.added function_call",
         "function_call_arguments.delta", *CALL_DONE, "completed"],
    ),
    "parallel calls": (
        f"{SUM}\n{SUM}",
        {"tools": TOOLS},
        ["output_item.added function_call", "function_call_arguments.delta", *CALL_DONE] * 2 + ["completed"],
    ),
    "reasoning, text, a call, text": (
        f"<think>Hm.</think>So.{SUM}And so.",
        {"tools": TOOLS},
        [*REASONING, "reasoning_text.delta", *REASONING_DONE, *MESSAGE, "output_text.delta", *MESSAGE_DONE,
         "output_item.added function_call", "function_call_arguments.delta", *CALL_DONE,
         *MESSAGE, "output_text.delta", *MESSAGE_DONE, "completed"],
    ),
    "a limit within text": (
        "Hello, world",
        {"max_output_tokens": 8},
        [*MESSAGE, "output_text.delta", "output_text.delta", *MESSAGE_DONE, "incomplete"],
    ),
    "a limit within reasoning": (
        "<think>Hm, hm",
        {"max_output_tokens": 10},
        [*REASONING, "reasoning_text.delta", "reasoning_text.delta", *REASONING_DONE, "incomplete"],
    ),
    "a limit within a call": (
        SUM,
        {"tools": TOOLS, "max_output_tokens": SUM.index("1")},
        ["output_item.added function_call", "function_call_arguments.delta", *CALL_DONE, "incomplete"],
    ),
    "a schema": (
        '{"a": 1}',
        {"text": {"format": SCHEMA}},
        [*MESSAGE, "output_text.delta", "output_text.delta", *MESSAGE_DONE, "completed"],
    ),
}  # fmt: skip


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 4096
    return server


def named(event: dict[str, Any]) -> str:
    """An event's name, with the type of what it adds or ends."""
    name = event["type"].removeprefix("response.") if event["type"] not in BEGIN else event["type"]
    part = event.get("item") or event.get("part")
    return f"{name} {part['type']}" if part else name


def halves(text: str) -> Any:
    """A script that says a text in two steps."""
    middle = (len(text.encode()) + 1) // 2
    return spell(text, width=max(middle, 1))


@pytest.mark.parametrize("case", SEQUENCES)
def test_the_events_of_a_stream(server: RunningServer, case: str) -> None:
    text, fields, expected = SEQUENCES[case]
    server.engine.script = halves(text)
    if "within" in case:
        # One step for each token, so that the limit is within the second half.
        limit = fields["max_output_tokens"]
        data = text.encode()[:limit]
        server.engine.script = lambda request, index: [list(data[: limit // 2 + 2]), list(data[limit // 2 + 2 :])]
    events = streamed(server, **fields)
    names = [named(event) for event in events]
    # How many deltas there are depends on how the text is cut.
    assert squeezed(names) == squeezed([*BEGIN, *expected])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert_coherent(events)
    assert without_ids(respond(server, **fields).json()) == without_ids(events[-1]["response"])


def squeezed(names: list[str]) -> list[str]:
    """Names without repeated deltas."""
    return [name for index, name in enumerate(names) if not (name.endswith("delta") and names[index - 1] == name)]


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("case", SEQUENCES)
def test_what_a_stream_says_does_not_depend_on_its_cutting(server: RunningServer, case: str, width: int) -> None:
    text, fields, _ = SEQUENCES[case]
    server.engine.script = spell(text, width=width)
    events = streamed(server, **fields)
    assert_coherent(events)
    assert without_ids(respond(server, **fields).json()) == without_ids(events[-1]["response"])


def assert_coherent(events: list[dict[str, Any]]) -> None:
    """Each item is begun and done once, in order; its deltas are its text; the last event has all items."""
    begun: dict[int, dict[str, Any]] = {}
    done: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for event in events:
        index: Any = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert index == len(begun) == len(done)
            assert event["item"]["status"] == "in_progress"
            begun[index] = event["item"]
            texts[index] = ""
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == begun[index]["id"]
            done[index] = event["item"]
        elif index is not None:
            assert index not in done
            assert event["item_id"] == begun[index]["id"]
            assert event.get("content_index", 0) == 0
            if event["type"].endswith(".delta"):
                texts[index] += event["delta"]
            elif "text" in event or "arguments" in event:
                assert texts[index] == event.get("text", event.get("arguments"))
            elif event["type"] == "response.content_part.done":
                assert texts[index] == event["part"]["text"]
    assert list(begun) == list(done)
    output = events[-1]["response"]["output"]
    assert output == list(done.values())
    for index, item in enumerate(output):
        assert (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]) == texts[index]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs each time."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {
        **response,
        "id": "",
        "created_at": 0,
        "completed_at": response["completed_at"] is not None,
        "output": items,
    }


def test_what_the_events_hold(server: RunningServer) -> None:
    server.engine.script = spell(f"Well.\n{CALL}", width=1000)
    created, in_progress, *events, completed = streamed(server, tools=TOOLS)
    response = created["response"]
    assert response == in_progress["response"]
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response["id"])
    assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
    message, call = completed["response"]["output"]
    message_id, item_id, call_id = message["id"], call["id"], call["call_id"]
    assert re.fullmatch(r"msg_[0-9a-f]{32} fc_[0-9a-f]{32} call_[0-9a-f]{24}", f"{message_id} {item_id} {call_id}")
    arguments = '{"city": "Zürich 🙂", "days": 2}'
    part = {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}
    of_message = {"item_id": message_id, "output_index": 0, "content_index": 0}
    of_call = {"item_id": item_id, "output_index": 1}
    item: dict[str, Any] = {"type": "message", "id": message_id, "role": "assistant"}
    call_item = {"type": "function_call", "id": item_id, "call_id": call_id, "name": "get_weather"}
    expected = [
        {"output_index": 0, "item": {**item, "status": "in_progress", "content": []}},
        {**of_message, "part": {**part, "text": ""}},
        {**of_message, "delta": "Well.", "logprobs": []},
        {**of_message, "text": "Well.", "logprobs": []},
        {**of_message, "part": part},
        {"output_index": 0, "item": {**item, "status": "completed", "content": [part]}},
        {"output_index": 1, "item": {**call_item, "status": "in_progress", "arguments": ""}},
        {**of_call, "delta": arguments},
        {**of_call, "name": "get_weather", "arguments": arguments},
        {"output_index": 1, "item": {**call_item, "status": "completed", "arguments": arguments}},
    ]
    said = [{name: event[name] for name in event if name not in ("type", "sequence_number")} for event in events]
    assert said == expected
    assert completed["response"] == {
        **response,
        "status": "completed",
        "completed_at": completed["response"]["completed_at"],
        "output": [expected[5]["item"], expected[9]["item"]],
        "usage": completed["response"]["usage"],
    }
    assert completed["response"]["completed_at"] >= response["created_at"]
    assert completed["response"]["usage"] == {
        "input_tokens": len(server.engine.requests[0].prompt_token_ids),
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": len(f"Well.\n{CALL}".encode()),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(server.engine.requests[0].prompt_token_ids) + len(f"Well.\n{CALL}".encode()),
    }


def test_reasoning_is_an_item_and_is_counted(server: RunningServer) -> None:
    server.engine.script = spell("<think>\nHm.\n</think>\n\nYes.")
    response = respond(server).json()
    reasoning, message = response["output"]
    assert reasoning == {
        "type": "reasoning",
        "id": reasoning["id"],
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": None,
    }
    assert reasoning["id"].startswith("rs_")
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("\nHm.\n")}


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_makes_a_response_incomplete(server: RunningServer, stream: bool) -> None:
    response = (
        streamed(server, max_output_tokens=5)[-1]["response"] if stream else respond(server, max_output_tokens=5).json()
    )
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    [message] = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hello")
    assert response["usage"]["output_tokens"] == 5


def test_a_call_that_is_cut_short_is_incomplete(server: RunningServer) -> None:
    server.engine.script = spell(f"{SUM}\n{SUM.partition('}')[0]}")
    response = respond(server, tools=TOOLS).json()
    assert [(item["status"], item["arguments"]) for item in response["output"]] == [
        ("completed", '{"a": 1}'),
        ("incomplete", '{"a": 1'),
    ]


def test_an_error_in_the_middle(server: RunningServer) -> None:
    """What has come is done, `error` says what happened here, `response.failed` in OpenAI's words."""
    server.engine.script = spell("Hello, world")
    server.engine.script_end = "error"
    events = streamed(server)
    names = [named(event) for event in events]
    assert squeezed(names) == [*BEGIN, *MESSAGE, "output_text.delta", *MESSAGE_DONE, "error", "failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *_, error, failed = events
    message = "Each worker process that computed this request was lost, so it was given up."
    assert error == {
        "type": "error", "sequence_number": len(events) - 2, "code": None, "message": message, "param": None,
    }  # fmt: skip
    response = failed["response"]
    assert (response["status"], response["completed_at"], response["usage"]) == ("failed", None, None)
    assert response["error"] == {"code": "server_error", "message": message}
    [item] = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello, world")


@pytest.mark.parametrize(
    ("reason", "by", "code", "status", "error"),
    [
        ("deadline", "", "deadline_exceeded", "failed", "server_error"),
        ("cancelled", BY_OPERATOR, "aborted", "failed", "server_error"),
        ("cancelled", BY_OWNER, "cancelled", "cancelled", None),
    ],
)
def test_why_a_response_ended_early(
    server: RunningServer, reason: Any, by: str, code: str, status: str, error: str | None
) -> None:
    server.engine.script_end = reason
    server.engine.cancelled_by[0] = by
    *_, told, failed = streamed(server)
    assert (told["type"], told["code"], failed["type"]) == ("error", code, "response.failed")
    response = failed["response"]
    assert (response["status"], response["error"] and response["error"]["code"]) == (status, error)


def test_an_error_before_the_first_event_has_its_status(server: RunningServer) -> None:
    server.engine.submit_error = EngineUnavailableError("the engine is gone")
    reply = respond(server, stream=True)
    assert (reply.status, reply.json()["error"]["type"]) == (503, "server_error")


def test_timings_are_in_the_last_event(server: RunningServer) -> None:
    *others, last = streamed(server, eventlm={"timings": True})
    assert last["response"]["eventlm"] == {"timings": []}
    assert all("eventlm" not in event.get("response", {}) for event in others)
    assert respond(server, eventlm={"timings": True}).json()["eventlm"] == {"timings": []}
