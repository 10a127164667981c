"""Chunks of streams in the forms that servers have for them."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.client.chunks import Chunk, ChunkChoice, ChunkDelta, FunctionPart, ToolCallPart, decode_chunk
from eventlm.client.sse import PromptDetails, TokenUsage


@pytest.mark.parametrize(
    ("data", "chunk"),
    [
        (b'{"id": "x", "choices": []}', Chunk([])),
        (b'{"choices": null, "usage": null}', Chunk()),
        (
            b'{"choices": [{"index": 1, "text": "a", "logprobs": null}]}',
            Chunk([ChunkChoice(1, "a", logprobs=msgspec.Raw(b"null"))]),
        ),
        (
            b'{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f"}}]}, "stop_reason": 3}]}',
            Chunk([ChunkChoice(delta=ChunkDelta(tool_calls=[ToolCallPart(None, FunctionPart("f"))]), stop_reason=3)]),
        ),
        (
            b'{"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}',
            Chunk([], TokenUsage(3, prompt_tokens_details=PromptDetails(2))),
        ),
        (b'{"error": {"message": "x"}}', Chunk(error={"message": "x"})),
    ],
)
def test_chunks(data: bytes, chunk: Chunk) -> None:
    assert decode_chunk(data) == chunk
