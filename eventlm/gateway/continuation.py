"""Requests that go on from output that another attempt gave.

The output becomes the end of the prompt. This is right only if a backend that is given a prompt with the output so far
draws the next token as it would have drawn it anyway: with no grammar, which would start again, no penalties that count
output apart from the prompt, and a known number of tokens left. An attempt that showed reasoning or tool calls is not
continued by anybody: its text is not all that the model wrote.
"""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.config.backends import BackendKind
from eventlm.engine.backends.protocol import Attempt, ForwardedRequest

_CONTINUES_TEXT: tuple[BackendKind, ...] = ("vllm", "sglang", "llamacpp", "eventlm")
#: These go on with a last message of the assistant when they are told to by vLLM's two fields.
_CONTINUES_CHATS: tuple[BackendKind, ...] = ("vllm", "llamacpp", "eventlm")
_LIMITS = ("max_tokens", "max_completion_tokens")
#: What depends on where the output starts, by what each server calls it.
_FROM_START = (
    "best_of", "ebnf", "echo", "frequency_penalty", "grammar", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "json_schema", "logit_processors", "logprobs", "min_tokens", "n_predict", "presence_penalty",
    "prompt_logprobs", "regex", "response_format", "structural_tag", "structured_outputs", "suffix", "thinking_budget",
    "thinking_token_budget", "use_beam_search",
)  # fmt: skip
_FROM_START_OF_CHATS = (
    "add_generation_prompt", "continue_final_message", "function_call", "functions", "modalities", "tool_choice",
    "tools", "top_logprobs",
)  # fmt: skip


def can_continue(kind: BackendKind, request: ForwardedRequest) -> bool:
    """Whether such a backend goes on from shown output of this request as if it had given it itself."""
    if request.endpoint == "embeddings":
        return False
    body = msgspec.json.decode(request.body)
    if any(body.get(name) for name in _FROM_START):
        return False
    if request.endpoint == "chat":
        return kind in _CONTINUES_CHATS and not any(body.get(name) is not None for name in _FROM_START_OF_CHATS)
    # A completion without a limit has that of the server, which counts from its own start.
    return kind in _CONTINUES_TEXT and _is_prompt(body.get("prompt")) and body.get("max_tokens") is not None


def continued(attempt: Attempt) -> bytes:
    """The body for the rest of an answer. There are tokens left of its limit."""
    body = msgspec.json.decode(attempt.request.body)
    if attempt.request.endpoint == "chat":
        body["messages"] = [*body["messages"], {"role": "assistant", "content": attempt.text}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif isinstance(body["prompt"], str):
        body["prompt"] += attempt.text
    else:
        body["prompt"] = body["prompt"] + attempt.token_ids
    for name in _LIMITS:
        if body.get(name) is not None:
            body[name] -= attempt.num_tokens
    return msgspec.json.encode(body)


def _is_prompt(prompt: Any) -> bool:
    """Whether it is one text or one list of token ids."""
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
    )
