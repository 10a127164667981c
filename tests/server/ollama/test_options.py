"""What `options`, `format` and `think` ask of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.text.chat_template import ChatTemplate
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.ollama.clients import assert_ollama_error, chat, generate

#: Every option of Ollama's documentation.
DOCUMENTED = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "draft_num_predict": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "typical_p": 0.7, "repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5,
    "frequency_penalty": 1.0, "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024,
    "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 8,
}  # fmt: skip


@pytest.mark.parametrize("ask", [chat, generate])
def test_all_documented_options(server: RunningServer, ask: Any) -> None:
    assert ask(server, options=DOCUMENTED).status == 200
    params = server.engine.requests[0].sampling
    assert (params.max_tokens, params.seed, params.temperature, params.min_p) == (100, 42, 0.8, 0.0)
    assert (params.top_k, params.top_p, params.repetition_penalty) == (20, 0.9, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (1.5, 1.0)
    assert params.stop == ["\n", "user:"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"max_tokens": 235}),
        ({"num_predict": -1}, {"max_tokens": 235}),
        ({"num_predict": 0}, {"max_tokens": 235}),
        # What the context has no room for is no error.
        ({"num_predict": 4096}, {"max_tokens": 235}),
        ({"num_predict": 5.0}, {"max_tokens": 5}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["", "x"]}, {"stop": ["x"]}),
        ({"stop": ""}, {"stop": []}),
        ({"temperature": 3}, {"temperature": 2.0}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"repeat_penalty": 0}, {"repetition_penalty": 1.0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1, "repeat_last_n": 0}, {"presence_penalty": 0.0}),
        ({"seed": -1}, {"seed": None}),
    ],
)
def test_an_option(server: RunningServer, options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(server, options=options).status == 200
    params = server.engine.requests[0].sampling
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"top_k": "a"}}, ("options.top_k", "int")),
        ({"options": {"stop": ["a", 1]}}, ("options.stop[1]",)),
        ({"options": []}, ("options",)),
        ({"format": "xml"}, ("format", "JSON schema")),
        ({"format": {"type": "strinx"}}, ("'format'", "strinx")),
        ({"format": {"properties": {"a": {"type": 7}}}}, ("'format.properties.a'",)),
        ({"think": "deeply"}, ("think", "'low'")),
        ({"think": True}, ("does not think",)),
        ({"top_logprobs": 21}, ("top_logprobs",)),
        ({"priority": "high"}, ("priority",)),
    ],
)
@pytest.mark.parametrize("ask", [chat, generate])
def test_what_is_wrong_is_named(
    server: RunningServer, ask: Any, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_ollama_error(ask(server, **fields), 400, *words)


@pytest.mark.parametrize("name", ["test", "test:latest", "org/test", "org/test:latest"])
def test_names_with_and_without_a_tag(server: RunningServer, name: str) -> None:
    assert chat(server, model=name, stream=False).json()["model"] == name
    assert server.engine.requests[0].scheduling.model == name.removesuffix(":latest")


@pytest.mark.parametrize("name", ["other", "test:7b", "latest", ":latest", "test:latest:latest"])
def test_other_names(server: RunningServer, name: str) -> None:
    assert_ollama_error(chat(server, model=name), 404, f"'{name}'")
    assert_ollama_error(chat(server, model=name, messages=[]), 404, f"'{name}'")


@pytest.mark.parametrize(
    ("think", "prompt"),
    [(None, "- -"), (False, "off -"), (True, "on -"), ("low", "on low"), ("max", "on high")],
)
def test_thinking_is_switched_in_the_template(start_with_ollama: Any, think: Any, prompt: str) -> None:
    server, _ = start_with_ollama(reasoning_parser="qwen3")
    switch = "{{ '-' if enable_thinking is undefined else 'on' if enable_thinking else 'off' }}"
    source = switch + " {{ reasoning_effort or '-' }}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    server.engine.script = spell("<think>hm</think>Yes.")
    message = chat(server, think=think, stream=False).json()["message"]
    assert bytes(server.engine.requests[0].prompt_token_ids).decode() == prompt
    # A model that thinks all the same does not show it.
    assert message == {"role": "assistant", "content": "Yes."} | ({} if think is False else {"thinking": "hm"})
