"""Requests that go on from output that another attempt gave.

The output becomes the end of the prompt. This is right only if a backend that is given a prompt with the output so far
draws the next token as it would have drawn it anyway: with no grammar, which would start again, no penalties that count
output apart from the prompt, and a known number of tokens left. A text is split into tokens anew, which gives those of
the output again wherever a tokenizer splits the beginning of a text as it splits the whole. Who calls sees to it that
an attempt that showed reasoning or tool calls is not continued: its text is not all that the model wrote.
"""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.config.backends import BackendKind
from eventlm.engine.backend import Attempt, BackendError, ForwardedRequest

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
    "add_generation_prompt", "continue_final_message", "function_call", "functions", "include_reasoning", "modalities",
    "separate_reasoning", "tool_choice", "tools", "top_logprobs",
)  # fmt: skip

#: Around reasoning, where a backend does not separate it from the answer.
_THOUGHTS = ("<think>", "</think>")


def can_continue(kind: BackendKind, request: ForwardedRequest, *, is_counted: bool = True) -> bool:
    """Whether such a backend goes on from shown output of this request as if it had given it itself.

    is_counted: whether it is known how many tokens of the request's limit are left.
    """
    if request.endpoint == "embeddings":
        return False
    body = msgspec.json.decode(request.body)
    if any(body.get(name) for name in _FROM_START):
        return False
    if not is_counted and any(body.get(name) is not None for name in _LIMITS):
        return False
    if request.endpoint == "chat":
        if any(body.get(name) is not None for name in _FROM_START_OF_CHATS):
            return False
        return kind in _CONTINUES_CHATS and not _ends_in_answer(body.get("messages"))
    prompt = body.get("prompt")
    # Token ids go on from token ids, which come only if they are asked for.
    is_prompt = isinstance(prompt, str) or (_is_token_ids(prompt) and bool(body.get("return_token_ids")))
    # A completion without a limit has that of the server, which counts from its own start.
    return kind in _CONTINUES_TEXT and is_prompt and body.get("max_tokens") is not None


def continued(attempt: Attempt) -> bytes | None:
    """The body for the rest of an answer; None if nothing is left of its limit.

    Raises BackendError if what was shown is not fit for it: its token ids are missing, or there is reasoning in it.
    """
    body = msgspec.json.decode(attempt.request.body)
    if attempt.request.endpoint == "chat":
        if any(mark in attempt.text for mark in _THOUGHTS):
            raise BackendError("the answer has reasoning in its text, which chat templates leave out", "refused")
        body["messages"] = [*body["messages"], {"role": "assistant", "content": attempt.text}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif isinstance(body["prompt"], str):
        body["prompt"] += attempt.text
    elif len(attempt.token_ids) == attempt.num_tokens:
        body["prompt"] += attempt.token_ids
    else:
        raise BackendError("the backend that had begun this answer did not tell its token ids", "refused")
    for name in _LIMITS:
        if body.get(name) is not None:
            body[name] -= attempt.num_tokens
            if body[name] <= 0:
                return None
    return msgspec.json.encode(body)


def _ends_in_answer(messages: Any) -> bool:
    """Whether the client wants an answer of its own to be continued, as llama.cpp does without being told."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return not isinstance(last, dict) or last.get("role") == "assistant"


def _is_token_ids(prompt: Any) -> bool:
    """Whether it is one list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
