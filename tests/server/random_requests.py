"""Requests drawn at random: near those that are right, and far from them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

KNOWN_METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
ODD_METHODS = ("get", "FOO", "P", "POST2", "PRI", "M-SEARCH", "X" * 40)
ODD_PATHS = (
    "/", "//", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v1/models/", "/v1//models", "/..", "*",
    "/v1/../metrics", "/v1/models/a/b/c", "/v1/models/%2e%2e%2f", "/v1/models/%00", "/%ff%fe", "/tokenize/", "/docs",
    "/v1/chat/completions?x=1&x=2&%", "/v1/chat/completions#a", "/V1/CHAT/COMPLETIONS", "http://x/v1/models",
    "/" + "a" * 4000, "/v1/models/" + "é", "/v1/stream/none", "/v1/requests/none/explain",
    "/v1/requests/chatcmpl-1/explain?from=-1",
)  # fmt: skip
CONTENT_TYPES = (
    "application/json", "application/json; charset=utf-8", "text/plain", "", "application/json; charset=utf-16",
    "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "APPLICATION/JSON", "json", "a/b/c;;=",
)  # fmt: skip
STRINGS = (
    "", "a", "hi there", "\0", "\ud83d", "\ude00\ud83d", "🙂", "é" * 70, "<|im_start|>", "<|eos|>", "{{ 1 / 0 }}",
    "../../etc/passwd", "%s%n", "a" * 300, "null", "-1", "\u202e", "1e999", "user", "tool", "fake", "json_schema",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 0.5, -0.0, 1.0, 1e-9, 1e9, 255, 256, 1023, 1024, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30,
    1.7976931348623157e308, -1e308, 5e-324,
)  # fmt: skip
#: What JSON's writers have got wrong before.
LITERALS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"01",
    b"'a'",
    b"undefined",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xff",
)

#: Names of fields that exist, for bodies that are right but for one of them.
FIELDS = (
    "model", "messages", "prompt", "input", "tokens", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "min_tokens", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "priority", "echo",
    "deadline_ms", "drop_if_late", "slo", "cache_salt", "add_special_tokens", "prompt_logprobs", "logprobs", "user",
    "top_logprobs", "chat_template_kwargs", "response_format", "structured_outputs", "tools", "tool_choice", "metadata",
    "documents", "continue_final_message", "add_generation_prompt", "encoding_format", "dimensions", "pooling",
    "truncate_prompt_tokens", "return_token_strs", "return_token_ids", "guided_regex", "service_tier", "best_of",
    "logprob_token_ids", "truncation_side", "thinking_token_budget", "chat_template", "spaces_between_special_tokens",
    "eventlm", "normalize", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "suffix", "guided_json",
    "instructions", "max_output_tokens", "previous_response_id", "conversation", "background", "store", "include",
    "reasoning", "text", "truncation", "prompt_cache_key",
    "options", "format", "think", "raw", "system", "images", "keep_alive", "content", "n_predict", "n_probs", "grammar",
    "samplers", "json_schema", "response_fields", "cache_prompt",
    "system", "stop_sequences", "thinking", "output_config", "thread", "mcp_servers",
)  # fmt: skip

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
BATCH = f"{CHAT}/batch"
ANTHROPIC = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}
LOOK_UP = {"name": "look_up", "description": "Look.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": LOOK_UP}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 3}'}}
CALLED = [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "4"}]
NAMED_SCHEMA = {"name": "b", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": NAMED_SCHEMA}
OLLAMA_CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"a": 3}}}]},
    {"role": "tool", "tool_name": "look_up", "content": "4"},
]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
ITEMS = [
    *MESSAGES[:1],
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": '{"a": 3}'},
    {"type": "function_call_output", "call_id": "1", "output": "4"},
]
FUNCTION = {"type": "function", **LOOK_UP}
CHOICE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look_up"}]}
#: In Anthropic's form.
INPUT_TOOL = {"name": "look_up", "description": "Look.", "input_schema": SCHEMA}
USED = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"a": 3}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4", "is_error": True}]},
]
THINKING = {"type": "enabled", "budget_tokens": 1024}
#: Bodies that are right, with the paths to which they belong.
TEMPLATES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": MESSAGES, "max_tokens": 4}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 3, "stop": ["e"]}),
    (CHAT, {"messages": CALLED, "max_tokens": 4, "stream": True, "stream_options": USAGE}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 20, "tools": [TOOL], "tool_choice": "required", "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "response_format": FORMAT}),
    (CHAT, {"messages": CALLED[:3], "add_generation_prompt": False, "echo": True, "max_tokens": 4, "stream": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [5, 300], "max_tokens": 4}),
    (BATCH, {"messages": [MESSAGES, CALLED], "max_tokens": 4, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2}),
    (COMPLETIONS, {"prompt": ["ab", [1, 2]], "max_tokens": 1, "truncate_prompt_tokens": 1, "truncation_side": "right"}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 1, "logprobs": 1, "echo": True, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "a", "stream": True, "priority": 1, "slo": {"ttft_ms": 5}, "eventlm": {"timings": True}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[a-z]{3}"}, "seed": 1}),
    (RESPONSES, {"input": ITEMS, "max_output_tokens": 4, "instructions": "Be brief.", "truncation": "auto"}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 20, "tools": [FUNCTION], "tool_choice": CHOICE, "stream": True}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "stream": True}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 9, "text": {"format": {"type": "json_schema", **NAMED_SCHEMA}}}),
    (RESPONSES, {"input": "hi", "max_output_tokens": 4, "background": True, "metadata": {"a": "b"}}),
    (RESPONSES, {"input": ITEMS, "max_output_tokens": 4, "background": True, "stream": True}),
    ("/v1/conversations", {"items": ITEMS, "metadata": {"a": "b"}}),
    (f"{RESPONSES}/input_tokens", {"input": ITEMS, "tools": [FUNCTION]}),
    (EMBEDDINGS, {"input": ["a", "b"], "dimensions": 4}),
    (EMBEDDINGS, {"input": [1, 2, 3], "encoding_format": "base64", "pooling": "mean"}),
    (ANTHROPIC, {"messages": USED, "max_tokens": 4, "system": "Be brief.", "stop_sequences": ["e"], "stream": True}),
    (ANTHROPIC, {"messages": USED, "max_tokens": 20, "tools": [INPUT_TOOL], "tool_choice": {"type": "any"}}),
    (ANTHROPIC, {"messages": USED[:1], "max_tokens": 9000, "thinking": THINKING, "stream": True, "top_k": 3}),
    (ANTHROPIC + "/count_tokens", {"messages": USED, "tools": [INPUT_TOOL], "system": [{"type": "text", "text": "x"}]}),
    ("/v1/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"messages": CALLED, "tools": [TOOL], "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/tokenize", {"content": "a", "with_pieces": True}),
    ("/apply-template", {"messages": CALLED, "tools": [TOOL]}),
    ("/completion", {"prompt": "a", "n_predict": 4, "n_probs": 2, "logit_bias": [[5, False], ["b", 1.5]]}),
    ("/completion", {"prompt": [[1, "a"], {"prompt_string": "b"}], "n_predict": 2, "stream": True}),
    ("/completion", {"prompt": [1, "a"], "n_predict": 0, "response_fields": ["content", "timings/prompt_n"]}),
    ("/embedding", {"content": ["a", [1, 2]], "embd_normalize": -1}),
    ("/api/chat", {"messages": OLLAMA_CALLED, "tools": [TOOL], "options": {"num_predict": 4, "seed": 1}}),
    ("/api/chat", {"messages": OLLAMA_CALLED, "format": SCHEMA, "stream": False, "options": {"num_predict": 9}}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 4, "stop": ["e"]}, "logprobs": True}),
    ("/api/generate", {"prompt": "a", "raw": True, "stream": False, "think": False, "options": {"num_predict": 2}}),
    ("/api/embed", {"input": ["a", "b"], "dimensions": 4}),
    ("/api/show", {"verbose": True}),
)


class RandomRequest(NamedTuple):
    """A request as it goes over the wire. `method` and `path` may be anything but white space."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def to_bytes(self) -> bytes:
        """The whole request, with the length of its body."""
        headers = {"Host": "localhost", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + self.body


def random_request(draw: random.Random, paths: list[str], model: str) -> RandomRequest:
    """The next triple of method, path and body; `paths` are those that the server has."""
    own_path, template = draw.choice(TEMPLATES)
    path, method = own_path, "POST"
    if draw.random() < 0.4:
        path = draw.choice(paths if draw.random() < 0.5 else ODD_PATHS)
        method = draw.choice(("GET", "POST"))
    if draw.random() < 0.15:
        method = draw.choice(KNOWN_METHODS) if draw.random() < 0.7 else draw.choice(ODD_METHODS)
    content_type = "application/json" if draw.random() < 0.9 else draw.choice(CONTENT_TYPES)
    headers = {"Content-Type": content_type} if content_type else {}
    if draw.random() < 0.05:
        headers[draw.choice(("Authorization", "Accept", "x-request-id", "Last-Event-ID", "x-eventlm-class"))] = "?;x"
    has_body = method not in ("GET", "HEAD", "CONNECT") or draw.random() < 0.1
    return RandomRequest(method, path, headers, _body(draw, template, model) if has_body else b"")


def _body(draw: random.Random, template: dict[str, Any], model: str) -> bytes:
    value: Any = {"model": model, **json.loads(json.dumps(template))}
    for _ in range(draw.choice((0, 0, 1, 1, 1, 2, 3))):
        value = _mutated(draw, value)
    if draw.random() < 0.03:
        value = _value(draw, 3)
    data = json.dumps(value).encode()
    if draw.random() < 0.15:
        damage: Callable[[random.Random, bytes], bytes] = draw.choice(DAMAGES)
        return damage(draw, data)
    return data


def _mutated(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a field more, less or other, at any depth."""
    body = dict(body)
    kind = draw.random()
    name = draw.choice(list(body)) if body and kind < 0.5 else draw.choice(FIELDS)
    if kind < 0.1:
        body.pop(name, None)
    elif kind < 0.3:
        body[name] = _inside(draw, body.get(name))
    else:
        body[name] = _value(draw, 3)
    return body


def _inside(draw: random.Random, value: Any) -> Any:
    """The value with something in it replaced."""
    if isinstance(value, dict) and value:
        name = draw.choice(list(value))
        return {**value, name: _inside(draw, value[name])}
    if isinstance(value, list) and value:
        index = draw.randrange(len(value))
        return [*value[:index], _inside(draw, value[index]), *value[index + 1 :]]
    return _value(draw, 2)


def _value(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(8 if depth else 5)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind <= 2:
        return draw.choice(NUMBERS)
    if kind <= 4:
        return draw.choice(STRINGS)
    if kind == 5:
        return [_value(draw, depth - 1) for _ in range(draw.choice((0, 1, 2, 5)))]
    if kind == 6:
        return {draw.choice((*FIELDS, *STRINGS)): _value(draw, depth - 1) for _ in range(draw.choice((0, 1, 3)))}
    return [draw.choice(NUMBERS)] * draw.choice((1, 3000))


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def _flip(draw: random.Random, data: bytes) -> bytes:
    index = draw.randrange(len(data))
    return data[:index] + bytes([draw.randrange(256)]) + data[index + 1 :]


def _write_literal(draw: random.Random, data: bytes) -> bytes:
    name = draw.choice(FIELDS).encode()
    return data[:-1] + b', "' + name + b'": ' + draw.choice(LITERALS) + b"}"


def _nest(draw: random.Random, data: bytes) -> bytes:
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = draw.choice((10, 900, 100_000))
    name = draw.choice(FIELDS).encode()
    return data[:-1] + b', "' + name + b'": ' + opening * depth + b"1" + closing * depth + b"}"


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut,
    _flip,
    _write_literal,
    _nest,
    lambda draw, data: draw.randbytes(draw.randrange(200)),
    lambda draw, data: data.decode().encode("utf-16"),
    lambda draw, data: b"\xef\xbb\xbf" + data,
    lambda draw, data: data + data,
    lambda draw, data: data[:-1] + b"," + data[1:],
    lambda draw, data: gzip.compress(data),
)
