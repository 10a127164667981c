"""Chats of other APIs than OpenAI's, and endpoints about tokens, of models that other servers run."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, BackendFailure
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.forwarding.conftest import ANSWER, CALLS, USAGE, forwarded
from tests.server.forwarding.test_chats import FOREIGN

TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def test_messages_of_anthropic(gateway: RunningServer) -> None:
    gateway.engine.answer = ANSWER
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        fields: Any = {"model": "test", "max_tokens": 50, "messages": MESSAGES, "tools": [TOOL], "system": "Be."}
        fields |= {"stop_sequences": ["END"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**fields)
    for found in (streamed, whole):
        thinking, text, *calls = found.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert (thinking.thinking, text.text) == ("Let me see.", "Well")
        assert [(call.name, json.dumps(call.input)) for call in calls] == CALLS
        assert found.stop_reason == "tool_use"
    assert (whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)) == USAGE["prompt"]
    body = forwarded(gateway)
    assert body["messages"] == [{"role": "system", "content": "Be."}, *MESSAGES]
    assert (body["max_tokens"], body["stop"]) == (50, ["END"])
    assert body["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert body["tools"][0]["function"]["name"] == "add"
    assert not body.keys() & {"model", "n", "seed", "stream", "priority"}
    assert gateway.engine.requests[-1].max_tokens == 50


def test_errors_of_anthropic(gateway: RunningServer) -> None:
    gateway.engine.answer = [BackendFailure("refused", "too long", 400)]
    reply = gateway.post("/v1/messages", {"model": "test", "max_tokens": 5, "messages": MESSAGES})
    assert (reply.status, reply.json()["error"]["message"]) == (400, "too long")


def test_responses(gateway: RunningServer) -> None:
    gateway.engine.answer = ANSWER
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="test", input="hi", tools=[tool], reasoning={"effort": "high"})
        with client.responses.create(model="test", input="hi", tools=[tool], stream=True) as stream:
            *_, last = stream
    assert last.type == "response.completed"
    for found in (whole, last.response):
        reasoning, message, *calls = found.output
        assert (reasoning.type, message.type) == ("reasoning", "message")
        assert found.output_text == "Well"
        assert [(call.name, call.arguments) for call in calls] == CALLS
        assert {call.status for call in calls} == {"completed"}
        assert found.usage is not None
        assert found.usage.output_tokens == USAGE["completion"]
    assert forwarded(gateway, 0)["reasoning_effort"] == "high"


def test_chats_of_ollama(gateway: RunningServer) -> None:
    gateway.engine.answer = ANSWER
    fields = {"model": "test", "messages": MESSAGES, "think": "high", "options": {"num_predict": 9, "top_k": 3}}
    message = gateway.post("/api/chat", {**fields, "stream": False}).json()["message"]
    assert (message["content"], message["thinking"]) == ("Well", "Let me see.")
    calls = [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == CALLS
    lines = [json.loads(line) for line in gateway.post("/api/chat", fields).data.splitlines()]
    assert "".join(line["message"].get("content", "") for line in lines) == "Well"
    body = forwarded(gateway)
    assert (body["max_tokens"], body["top_k"], body["reasoning_effort"]) == (9, 3, "high")


def test_prompts_of_ollama_are_chats(gateway: RunningServer) -> None:
    fields = {"model": "test", "prompt": "hi", "stream": False, "format": {"type": "object"}}
    assert gateway.post("/api/generate", fields).json()["response"] == "Hello"
    assert forwarded(gateway)["messages"] == MESSAGES
    schema = {"name": "reply", "schema": {"type": "object"}}
    assert forwarded(gateway)["response_format"] == {"type": "json_schema", "json_schema": schema}
    gateway.post("/api/generate", {"model": "test", "prompt": "hi", "stream": False, "raw": True})
    assert forwarded(gateway) == {"prompt": "hi"}


def test_completions_of_llama_cpp(gateway: RunningServer) -> None:
    gateway.engine.answer = [AnswerDelta("Hello", 2), AnswerEnd("stop", stop_reason="END")]
    fields = {"prompt": "hi", "n_predict": 9, "grammar": 'root ::= "x"', "logit_bias": [[7, False]], "n_probs": 2}
    reply = gateway.post("/completion", fields).json()
    assert (reply["content"], reply["prompt"], reply["tokens_predicted"]) == ("Hello", "hi", 2)
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", "END")
    assert forwarded(gateway) == {
        "prompt": "hi",
        "max_tokens": 9,
        "structured_outputs": {"grammar": 'root ::= "x"'},
        "logit_bias": {"7": -100.0},
        "logprobs": 2,
    }
    reply = gateway.post("/completion", {"prompt": ["a", [1, 2]]})
    assert [each["content"] for each in reply.json()] == ["Hello", "Hello"]
    assert [forwarded(gateway, index)["prompt"] for index in (-2, -1)] == ["a", [1, 2]]


def test_several_conversations(gateway: RunningServer) -> None:
    reply = gateway.post("/v1/chat/completions/batch", {"model": "test", "messages": [MESSAGES, MESSAGES]})
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["Hello", "Hello"]
    assert forwarded(gateway) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"model": "test", "prompt": "hi"}),
        ("/tokenize", {"model": "test", "messages": MESSAGES}),
        ("/tokenize", {"content": "hi"}),
        ("/detokenize", {"model": "test", "tokens": [1]}),
        ("/apply-template", {"model": "test", "messages": MESSAGES}),
        ("/completion", {"prompt": ["a", 1]}),
        ("/completion", {"prompt": "a", "logit_bias": [["word", 1]]}),
    ],
)
def test_tokens_that_are_not_known(gateway: RunningServer, path: str, fields: dict[str, Any]) -> None:
    message = "The tokens of this model are not known, because other servers run it"
    assert_error(gateway.post(path, fields), 400, INVALID, "model", "invalid_value", message)


def test_own_models_stay_strict_beside_forwarded_ones(server: RunningServer) -> None:
    assert_error(server.chat(**FOREIGN), 400, INVALID, "temperature", "invalid_value")


def test_what_is_said_of_the_model(gateway: RunningServer) -> None:
    assert gateway.request("GET", "/v1/models/test").json()["meta"]["n_vocab"] == 0
    shown = gateway.post("/api/show", {"model": "test"}).json()
    assert "tools" in shown["capabilities"]
