"""Errors amid a stream, timings, and calls whose arguments are no object."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.ollama.clients import assert_ollama_error, chat, generate, lines
from tests.server.tool_calls import TOOLS


@pytest.mark.parametrize("ask", [chat, generate])
def test_an_error_amid_a_stream_is_its_last_line(server: RunningServer, ask: Any) -> None:
    server.engine.script_end = "error"
    *_, before, last = lines(ask(server))
    assert before["done"] is False
    assert last.keys() == {"error"}
    assert "given up" in last["error"]
    assert_ollama_error(ask(server, stream=False), 500)


def test_the_official_client_raises_it(start_with_ollama: Any) -> None:
    server, client = start_with_ollama()
    server.engine.script_end = "error"
    stream = client.generate(model="test", prompt="hi", stream=True)
    with pytest.raises(ollama.ResponseError, match="given up"):
        list(stream)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Bern"}', {"city": "Bern"}),
        ("{}", {}),
        ('{"city" "Bern"}', None),
        ('{"city": "Bern"]}', None),
    ],
)
def test_arguments(start_with_ollama: Any, arguments: str, expected: dict[str, Any] | None) -> None:
    server, _ = start_with_ollama(tool_parser="hermes")
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    server.engine.script = spell(text, width=3)
    message = chat(server, tools=TOOLS, stream=False).json()["message"]
    assert [each["function"]["arguments"] for each in message.get("tool_calls", [])] == [expected] * (
        expected is not None
    )
    assert message["content"].startswith("" if expected is not None else f'{{"name": "add", "arguments": {arguments}')


def test_timings_are_there_where_asked_for(server: RunningServer) -> None:
    timings = {"eventlm": {"timings": True}}
    *_, last = lines(chat(server, **timings))
    assert last["eventlm"] == {"timings": []}
    assert chat(server, stream=False, **timings).json()["eventlm"] == {"timings": []}
