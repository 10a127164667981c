"""Nothing of what a client sends reaches the trace or the log: a word in every field of a request is in neither."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.cli.conftest import StartServer

CANARY = "canary-f3a9c1"
#: A conversation with the canary in every field that a message can have.
CANARY_MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "name": f"{CANARY}-name", "content": [{"type": "text", "text": f"{CANARY}-part"}]},
    {"role": "user", "content": f"{CANARY}-question"},
    {
        "role": "assistant",
        "reasoning_content": f"{CANARY}-reasoning",
        "tool_calls": [
            {"id": f"{CANARY}-id", "type": "function", "function": {"name": f"{CANARY}-f", "arguments": f"{CANARY}-x"}}
        ],
    },
    {"role": "tool", "tool_call_id": f"{CANARY}-id", "content": f"{CANARY}-result"},
    {"role": "assistant", "content": f"{CANARY}-start"},
]
CANARY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": f"{CANARY}-tool",
        "description": f"{CANARY}-description",
        "parameters": {"properties": {f"{CANARY}-property": {"enum": [f"{CANARY}-choice"]}}},
        "strict": True,
    },
}
CANARY_FIELDS: dict[str, Any] = {
    "user": f"{CANARY}-user",
    "metadata": {f"{CANARY}-name": f"{CANARY}-value"},
    "cache_salt": f"{CANARY}-salt",
    "prompt_cache_key": f"{CANARY}-key",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


@pytest.mark.parametrize("front_ends", [pytest.param("0", marks=pytest.mark.soak), "1"])
def test_no_prompt_and_no_secret_reach_the_trace_or_the_log(start_server: StartServer, front_ends: str) -> None:
    environment = {"EVENTLM_API_KEY": f"{CANARY}-key"}
    server = start_server("--model", "fake", "--api-servers", front_ends, environment=environment)
    assert '-H "Authorization: Bearer $EVENTLM_API_KEY"' in server.log_event("ready")["hint"]
    canaries: dict[str, Any] = {
        "stop": [f"{CANARY}-stop"],
        "user": f"{CANARY}-user",
        "metadata": {f"{CANARY}-name": f"{CANARY}-value"},
        "cache_salt": f"{CANARY}-salt",
        "extra_body": {"safety_identifier": f"{CANARY}-safety"},
    }
    message = {"role": "user", "name": f"{CANARY}-name", "content": f"{CANARY}-content"}
    client = server.client(api_key=f"{CANARY}-key", default_headers={"x-custom": f"{CANARY}-header"})
    salted = {"extra_body": {**canaries.pop("extra_body"), **{name: canaries.pop(name) for name in ("cache_salt",)}}}
    whole = client.chat.completions.create(model="fake", messages=[message], max_tokens=8, **canaries, **salted)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    fields = {"stop": canaries["stop"], "user": canaries["user"]}
    client.completions.create(model="fake", prompt=f"{CANARY}-prompt", max_tokens=8, **fields, **salted)
    more = {
        **CANARY_FIELDS, "continue_final_message": True,
        "chat_template_kwargs": {"style": f"{CANARY}-style"},
    }  # fmt: skip
    messages: Any = CANARY_MESSAGES
    for stream in (False, True):
        reply = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=8, logprobs=True, stream=stream, extra_body=more
        )
        assert len(list(reply)) > 3
        echoed = client.completions.create(
            model="fake", prompt=f"{CANARY}-echo", max_tokens=0, echo=True, logprobs=1, stream=stream,
            extra_body=CANARY_FIELDS,
        )  # fmt: skip
        assert len(list(echoed)) > 1
        for choice in ("auto", "required", {"type": "function", "function": {"name": f"{CANARY}-tool"}}):
            called = client.chat.completions.create(
                model="fake",
                messages=[message],
                max_tokens=150,
                stream=stream,
                tool_choice=choice,
                tools=[CANARY_TOOL],
                parallel_tool_calls=False,
            )  # type: ignore[call-overload]
            assert len(list(called)) > 1
    wrong_parameters = {"properties": {f"{CANARY}-property": {"$ref": f"#/{CANARY}-nowhere"}}}
    wrong_tool = {"type": "function", "function": {"name": f"{CANARY}-tool", "parameters": wrong_parameters}}
    for wrong in ({"tools": [wrong_tool]}, {"tools": [CANARY_TOOL, CANARY_TOOL]}, {"tools": [{"type": CANARY}]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model="fake", messages=[message], tool_choice="required", extra_body=wrong, max_tokens=1
            )
    refused: list[dict[str, Any]] = [
        {"metadata": {f"{CANARY}-long" * 9: f"{CANARY}-value"}}, {"metadata": {f"{CANARY}-name": 5}},
        {"user": [f"{CANARY}-user"]}, {"suffix": f"{CANARY}-suffix"}, {"chat_template": f"{CANARY}-template"},
        {"documents": [{"title": f"{CANARY}-title", "text": "x"}]}, {"truncate_prompt_tokens": f"{CANARY}-number"},
    ]  # fmt: skip
    for extra in refused:
        endpoints = [(client.chat.completions, {"messages": messages}), (client.completions, {"prompt": f"{CANARY}-p"})]
        statuses = set()
        for endpoint, prompt in endpoints:
            try:
                endpoint.create(model="fake", max_tokens=1, **prompt, extra_body=extra)
            except openai.BadRequestError as error:
                statuses.add(error.param)
        assert statuses == set(extra)
    for bad in ({"model": f"{CANARY}-model"}, {"model": "fake", "temperature": f"{CANARY}-type"}):
        with pytest.raises(openai.APIStatusError):
            client.completions.create(prompt=f"{CANARY}-prompt", **bad)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=f"{CANARY}-wrong").models.list()
    server.stop_and_verify()
    assert server.trace.stat().st_size > 1000
    assert CANARY not in server.trace.read_text()
    assert CANARY not in server.stderr
    assert '"api_key":"***"' in server.trace.read_text()
    assert server.trace.stat().st_mode & 0o777 == 0o600
