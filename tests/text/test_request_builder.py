"""Requests in the engine's form, and the field that an error names, streamed or not, before the engine is called."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.sampling_params import SamplingParams
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.request_builder import RequestBuilder
from tests.server.conftest import INVALID, RunningServer, assert_error


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [1]}, "messages[0]", "invalid_type"),
    ({"messages": user(5)}, "messages[0].content", "invalid_type"),
    ({"messages": user(None)}, "messages[0].content", "invalid_type"),
    ({"messages": user([{"type": "text", "text": 1}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"text": "x"}])}, "messages[0].content[0].type", "missing_required_parameter"),
    (
        {"messages": user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}])},
        "messages[0].content[1].type",
        "invalid_value",
    ),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [*user("x"), {"role": "assitant", "content": "x"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 5000}, "stop", "invalid_value"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "invalid_type"),
    ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", "invalid_value"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids[0]", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"deadline_ms": 0}, "deadline_ms", "invalid_value"),
    ({"deadline_ms": 10**30}, "deadline_ms", "invalid_value"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "invalid_value"),
    ({"slo": 5}, "slo", "invalid_type"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "invalid_type"),
    ({"min_p": 1.1}, "min_p", "invalid_value"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"min_tokens": 250}, "min_tokens", "invalid_value"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1024": 1}}, "logit_bias.1024", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [5, 1024]}, "allowed_token_ids[1]", "invalid_value"),
    ({"bad_words": "x"}, "bad_words", "invalid_type"),
    ({"bad_words": ["x", ""]}, "bad_words[1]", "invalid_value"),
    ({"bad_words": ["  "]}, "bad_words[0]", "invalid_value"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]", "invalid_value"),
    ({"bad_words": ["x"] * 257}, "bad_words", "invalid_value"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "invalid_type"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"return_token_ids": 1}, "return_token_ids", "invalid_type"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"user": 5}, "user", "invalid_type"),
    ({"metadata": ["x"]}, "metadata", "invalid_type"),
    ({"metadata": {"x": 5}}, "metadata", "invalid_type"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    ({"documents": ["x"]}, "documents[0]", "invalid_type"),
    ({"documents": [{"text": "not read by this template"}]}, "documents", "invalid_value"),
    ({"best_of": 3}, "best_of", "invalid_value"),
    ({"verbosity": "high"}, "verbosity", "invalid_value"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "invalid_value"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort", "invalid_value"),
    ({"echo": 1}, "echo", "invalid_type"),
    ({"length_penalty": 2}, "length_penalty", "invalid_value"),
    ({"use_beam_search": "yes"}, "use_beam_search", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHAT_FIELDS)
def test_bad_fields_of_a_chat(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    for stream in ({}, {"stream": True}):
        assert_error(server.chat(**{**stream, **fields}), 400, INVALID, param, code, message=param)
    assert not server.engine.requests


BAD_COMPLETION_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["x", ""]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1, "x"]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["x", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["x", [1024]]}, "prompt[1][0]", "invalid_value"),
    ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[1], [2, 1024]]}, "prompt[1][1]", "invalid_value"),
    ({"prompt": ["x"] * 100, "n": 100}, "prompt", "invalid_value"),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "invalid_value"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"bad_words": [" "]}, "bad_words[0]", "invalid_value"),
    ({"suffix": "x"}, "suffix", "invalid_value"),
    ({"best_of": 2}, "best_of", "invalid_value"),
    ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_COMPLETION_FIELDS)
def test_bad_fields_of_a_completion(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    assert_error(server.complete(**fields), 400, INVALID, param, code, message=param)
    assert not server.engine.requests


def test_over_the_context(server: RunningServer) -> None:
    code = "context_length_exceeded"
    for fields in ({"max_tokens": 1000}, {"max_completion_tokens": 1000}):
        assert_error(server.chat(**fields), 400, INVALID, "messages", code, message="256 tokens")
        assert "1021 tokens" in server.chat(**fields).json()["error"]["message"]
    assert_error(server.complete(prompt="x" * 300), 400, INVALID, "prompt", code, message="302 tokens")
    assert_error(server.complete(prompt=[5] * 256), 400, INVALID, "prompt", code, message="257 tokens")
    assert_error(server.complete(prompt=["x", "y" * 300]), 400, INVALID, "prompt", code)
    assert not server.engine.requests
    assert server.complete(prompt=[5] * 255, max_tokens=1).status == 200


def builder(vocab_size: int) -> RequestBuilder:
    engine: Any = None
    defaults = SamplingParams(eos_token_ids=(7,))
    return RequestBuilder(engine, FakeTokenizer(), defaults=defaults, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 1e-5}, {"temperature": 1e-5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 100}, {"top_k": 0}),
        ({"top_k": 99}, {"top_k": 99}),
        ({"logprobs": -1, "prompt_logprobs": 500}, {"logprobs": 100, "prompt_logprobs": 100}),
        ({}, {"eos_token_ids": (7,)}),
    ],
)
def test_standard_forms(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = builder(100).resolve(SamplingParams(**given))
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids[0]"),
        ({"logit_bias": {100: 1.0}}, "logit_bias.100"),
    ],
)
def test_tokens_that_the_model_does_not_have(given: dict[str, Any], param: str) -> None:
    builder(101).resolve(SamplingParams(**given))
    with pytest.raises(InputError) as caught:
        builder(100).resolve(SamplingParams(**given))
    assert caught.value.param == param


def test_assigned_values_are_checked_when_they_are_used() -> None:
    params = SamplingParams()
    params.temperature = 3.0
    with pytest.raises(InputError) as caught:
        builder(100).resolve(params)
    assert caught.value.param == "temperature"
