"""The chunks of OpenAI's streams: those of chats and of completions, with what vLLM and SGLang add to them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from eventlm.client.sse import TokenUsage

DONE = b"[DONE]"

#: Of a token, or a position in a list.
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]


class FunctionPart(Struct, frozen=True):
    """A part of a function call. `arguments` is a piece of JSON."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(Struct, frozen=True):
    """A part of a tool call; some servers leave out the index of the only one."""

    index: Index | None = None
    function: FunctionPart | None = None


class ChunkDelta(Struct, frozen=True):
    """What a chat's message goes on with. `reasoning_content` and `reasoning` are two names of the same."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChunkChoice(Struct, frozen=True):
    """`text` is a completion's, `delta` a chat's. `stop_reason` is vLLM's, `matched_stop` SGLang's name of the same."""

    index: int = 0
    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None
    logprobs: Raw = Raw()
    token_ids: list[Index] | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class Chunk(Struct, frozen=True):
    """One event of a stream. `error` is whatever a server puts there."""

    choices: list[ChunkChoice] | None = None
    usage: TokenUsage | None = None
    error: Any = None


#: Raises msgspec.DecodeError or UnicodeDecodeError.
decode_chunk = msgspec.json.Decoder(Chunk).decode
