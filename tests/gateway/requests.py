"""Attempts as tests make them."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, Attempt, BackendError, Endpoint, ForwardedRequest
from eventlm.gateway.client import HttpBackend
from tests.processes import PATIENCE_SECONDS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 100}


def forwarded(body: dict[str, Any]) -> ForwardedRequest:
    """A request for what the body says."""
    endpoint: Endpoint = "chat" if "messages" in body else "completions" if "prompt" in body else "embeddings"
    return ForwardedRequest(endpoint=endpoint, body=msgspec.json.encode(body))


def attempt(body: dict[str, Any], *, seed: int = 7, **more: Any) -> Attempt:
    """One attempt at it."""
    times = {"first_seconds": PATIENCE_SECONDS, "silence_seconds": PATIENCE_SECONDS}
    return Attempt(request=forwarded(body), **{"seed": seed, "request_id": "req-1", **times, **more})


async def answer(client: HttpBackend, body: dict[str, Any], **more: Any) -> tuple[str, list[AnswerDelta], AnswerEnd]:
    """The text, all deltas and the end of an answer."""
    *deltas, ended = [item async for item in client.forward(attempt(body, **more))]
    assert isinstance(ended, AnswerEnd)
    found = [delta for delta in deltas if isinstance(delta, AnswerDelta)]
    assert len(found) == len(deltas)
    return "".join(delta.text for delta in found), found, ended


async def failure(client: HttpBackend, body: dict[str, Any], **more: Any) -> tuple[BackendError, str]:
    """The error of an answer that fails, and the text before it."""
    texts: list[str] = []
    with pytest.raises(BackendError) as caught:
        await _collect(client, attempt(body, **more), texts)
    assert "\n" not in str(caught.value)
    return caught.value, "".join(texts)


async def _collect(client: HttpBackend, one: Attempt, texts: list[str]) -> None:
    async with aclosing(client.forward(one)) as items:
        async for item in items:
            assert isinstance(item, AnswerDelta)
            texts.append(item.text)
