"""Which requests can go on from shown output, and with what body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventlm.config.backends import BackendKind
from eventlm.engine.backend import Attempt, BackendError
from eventlm.gateway.continuation import can_continue, continued
from tests.gateway.requests import attempt, forwarded

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 9}


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (CHAT, {"vllm", "llamacpp", "eventlm"}),
        (CHAT | {"temperature": 1.0, "stop": ["x"], "repetition_penalty": 1.2}, {"vllm", "llamacpp", "eventlm"}),
        (CHAT | {"presence_penalty": 0}, {"vllm", "llamacpp", "eventlm"}),
        (COMPLETION, {"vllm", "sglang", "llamacpp", "eventlm"}),
        (COMPLETION | {"prompt": [1, 2], "return_token_ids": True}, {"vllm", "sglang", "llamacpp", "eventlm"}),
        (COMPLETION | {"prompt": [1, 2]}, set()),
        (COMPLETION | {"prompt": ["a", "b"]}, set()),
        (COMPLETION | {"prompt": [[1, 2]]}, set()),
        (COMPLETION | {"prompt": []}, set()),
        ({"prompt": "no limit"}, set()),
        (COMPLETION | {"echo": True}, set()),
        (COMPLETION | {"frequency_penalty": 0.5}, set()),
        (COMPLETION | {"structured_outputs": {"regex": "a+"}}, set()),
        (CHAT | {"tools": [{"type": "function"}]}, set()),
        (CHAT | {"response_format": {"type": "json_object"}}, set()),
        (CHAT | {"continue_final_message": True, "add_generation_prompt": False}, set()),
        (CHAT | {"logprobs": True}, set()),
        (CHAT | {"include_reasoning": False}, set()),
        ({"messages": [*CHAT["messages"], {"role": "assistant", "content": "Well,"}]}, set()),
        ({"messages": []}, set()),
        ({"input": "x"}, set()),
    ],
)
def test_can_continue(body: dict[str, Any], kinds: set[BackendKind]) -> None:
    every: tuple[BackendKind, ...] = ("vllm", "sglang", "llamacpp", "ollama", "openai", "eventlm")
    assert {kind for kind in every if can_continue(kind, forwarded(body))} == kinds


def test_limited_answers_that_nobody_counted_are_not_continued() -> None:
    assert can_continue("vllm", forwarded(CHAT), is_counted=False)
    assert not can_continue("vllm", forwarded(CHAT | {"max_tokens": 9}), is_counted=False)
    assert not can_continue("vllm", forwarded(COMPLETION), is_counted=False)


def rest(one: Attempt) -> Any:
    """The body of the rest of an answer."""
    body = continued(one)
    return None if body is None else json.loads(body)


def test_bodies_of_the_rest() -> None:
    shown: dict[str, Any] = {"text": " wor", "token_ids": [7, 8], "num_tokens": 2}
    chat = rest(attempt(CHAT | {"max_completion_tokens": 9}, **shown))
    assert chat == {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": " wor"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_completion_tokens": 7,
    }
    assert rest(attempt(COMPLETION, **shown)) == {"prompt": "hello wor", "max_tokens": 7}
    assert rest(attempt(COMPLETION | {"prompt": [5]}, **shown))["prompt"] == [5, 7, 8]
    assert rest(attempt(COMPLETION, text="x", num_tokens=9)) is None
    with pytest.raises(BackendError, match="did not tell its token ids"):
        continued(attempt(COMPLETION | {"prompt": [5]}, text="x", num_tokens=1))
    with pytest.raises(BackendError, match="reasoning in its text"):
        continued(attempt(CHAT, text="<think>Well", num_tokens=2))
