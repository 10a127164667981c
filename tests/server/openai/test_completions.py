"""Completions: prompts in every form, choices numbered prompt-major, OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import RunningServer


@pytest.fixture
def client(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[256, 97, 98]]),
        (["ab", "c"], [[256, 97, 98], [256, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        (["ab", [97, 98], "c", [99]], [[256, 97, 98], [97, 98], [256, 99], [99]]),
    ],
)
def test_forms_of_a_prompt(
    server: RunningServer, client: openai.OpenAI, prompt: Any, expected: list[list[int]]
) -> None:
    reply = client.completions.create(model="test", prompt=prompt)
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice.text for choice in reply.choices] == ["Hello, world"] * len(expected)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, expected))
    assert reply.usage.completion_tokens == 12 * len(expected)


def test_special_tokens_can_be_left_out(server: RunningServer) -> None:
    server.complete(prompt="ab", add_special_tokens=False)
    assert server.engine.requests[0].prompt_token_ids == [97, 98]


def test_choices_are_numbered_by_prompt_then_sample(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = lambda request, index: [[request.prompt_token_ids[-1]], [ord("0") + index]]
    whole = client.completions.create(model="test", prompt=["a", "b"], n=2)
    expected = ["a0", "a1", "b0", "b1"]
    assert [choice.text for choice in whole.choices] == expected
    streamed = [""] * 4
    reasons = [None] * 4
    for chunk in client.completions.create(model="test", prompt=["a", "b"], n=2, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert streamed == expected
    assert reasons == ["stop"] * 4


def test_stream_shape(server: RunningServer) -> None:
    *chunks, last, done = server.complete(stream=True, max_tokens=2, stream_options={"include_usage": True}).events()
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    assert chunks == [
        {
            "object": "text_completion",
            "model": "test",
            "choices": [
                {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
                | ({"stop_reason": None} if reason else {})
            ],
            "system_fingerprint": None,
            "usage": None,
        }
        for text, reason in [("H", None), ("e", None), ("", "length")]
    ]


def test_one_failing_request_of_a_group_ends_all(server: RunningServer) -> None:
    def script(request, index):
        return [] if request.prompt_token_ids[-1] == ord("b") else [[97]] * 50

    server.engine.script = script
    server.engine.step_seconds = 0.01
    server.engine.script_end = "error"
    assert server.complete(prompt=["a", "b"]).status == 500
    assert (0, "client") in server.engine.cancelled
