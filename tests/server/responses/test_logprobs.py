"""Log-probabilities are those of a message's own tokens, however its text was cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.responses.responding import LOGPROBS, TOOLS, respond, streamed
from tests.server.tool_calls import CALL


@pytest.fixture
def server(start_server: Any) -> RunningServer:
    server: RunningServer = start_server(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 4096
    return server


def message_of(response: dict[str, Any], number: int = 0) -> dict[str, Any]:
    messages = [item for item in response["output"] if item["type"] == "message"]
    part: dict[str, Any] = messages[number]["content"][0]
    return part


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "messages", "fields"),
    [
        ("Hi 🙂", ["Hi 🙂"], {}),
        ("<think>\nHm.\n</think>\n\nYes 🙂.", ["Yes 🙂."], {}),
        (f"Well <too.\n{CALL}", ["Well <too."], {"tools": TOOLS}),
        (f"<think>Hm.</think>So.{CALL}Then.", ["So.", "Then."], {"tools": TOOLS}),
        ("Hi there", ["Hi"], {"stop": [" there"]}),
    ],
)
def test_the_tokens_of_a_message(
    server: RunningServer, text: str, messages: list[str], fields: dict[str, Any], width: int
) -> None:
    server.engine.script = spell(text, width=width)
    fields = {**fields, "include": [LOGPROBS], "top_logprobs": 2}
    response = respond(server, **fields).json()
    events = streamed(server, **fields)
    assert response["top_logprobs"] == 2
    for number, message in enumerate(messages):
        part = message_of(response, number)
        assert part["text"] == message
        logprobs = part["logprobs"]
        said = bytes(byte for entry in logprobs for byte in entry["bytes"]).decode()
        # The tokens of a stop string belong to the output.
        assert said == message + "".join(fields.get("stop", ""))
        assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
        assert message_of(events[-1]["response"], number) == part
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        own = [event for event in deltas if event["item_id"] == deltas[-1]["item_id"]]
        if number == len(messages) - 1:
            assert [entry for event in own for entry in event["logprobs"]] == logprobs
        [done] = [
            event for event in events if event["type"] == "response.output_text.done" and event["text"] == message
        ]
        assert done["logprobs"] == logprobs


def test_there_are_none_unless_they_are_included(server: RunningServer) -> None:
    assert message_of(respond(server, top_logprobs=2).json())["logprobs"] == []
    assert server.engine.requests[-1].sampling.logprobs is None
    [entry, *_] = message_of(respond(server, include=[LOGPROBS]).json())["logprobs"]
    assert entry == {"token": "H", "logprob": -0.72, "bytes": [72], "top_logprobs": []}
