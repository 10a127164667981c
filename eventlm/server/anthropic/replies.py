"""Replies in Anthropic's format, and the events of their streams. Fields that are `UNSET` are left out."""

from __future__ import annotations

from typing import Literal, Union

from msgspec import UNSET, Raw, Struct, UnsetType

from eventlm.server.anthropic.errors import ErrorReply
from eventlm.server.anthropic.protocol import TextBlock, ThinkingBlock
from eventlm.server.timings import EventlmReply
from eventlm.text.generation import UsageCounts

MessageStop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
#: What usage says of requests without a service class.
STANDARD = "standard"


class ToolUseOutput(Struct, frozen=True, tag="tool_use"):
    """A call. `input` is a JSON object, as the model wrote it; empty if that was cut short or is no JSON."""

    id: str
    name: str
    input: Raw


ReplyBlock = Union[TextBlock, ThinkingBlock, ToolUseOutput]  # noqa: UP007


class MessageTokensDetails(Struct, frozen=True):
    """How many of the output's tokens were reasoning, shown or not, without the marks around it."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts so far. The prompt has `input_tokens` and those that came from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | UnsetType = UNSET
    service_tier: str = STANDARD

    @classmethod
    def of(cls, counts: UsageCounts, tier: str | UnsetType) -> MessageUsage:
        """The usage that a reply reports. tier: the service class, if the request has one."""
        return cls(
            input_tokens=counts.prompt - counts.cached,
            cache_read_input_tokens=counts.cached,
            output_tokens=counts.completion,
            output_tokens_details=UNSET if counts.reasoning is None else MessageTokensDetails(counts.reasoning),
            service_tier=STANDARD if tier in (UNSET, "default") else str(tier),
        )


class MessageReply(Struct, frozen=True, kw_only=True, tag="message"):
    """Reply of `/v1/messages`. `stop_reason` is null only at the start of a stream."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: MessageStop | None
    stop_sequence: str | None
    usage: MessageUsage
    eventlm: EventlmReply | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    """Reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class TextDelta(Struct, frozen=True, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """More of the reasoning."""

    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    """The end of the reasoning."""

    signature: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta"):
    """A call's whole input, as the model wrote it."""

    partial_json: str


BlockDelta = Union[TextDelta, ThinkingDelta, SignatureDelta, InputJsonDelta]  # noqa: UP007


class StopDelta(Struct, frozen=True):
    """How the message ended."""

    stop_reason: MessageStop
    stop_sequence: str | None


class MessageStartEvent(Struct, frozen=True, tag="message_start"):
    """First: the message without its content."""

    message: MessageReply


class ContentBlockStartEvent(Struct, frozen=True, tag="content_block_start"):
    """A block begins. It is empty."""

    index: int
    content_block: ReplyBlock


class PingEvent(Struct, frozen=True, tag="ping"):
    """Nothing."""


class ContentBlockDeltaEvent(Struct, frozen=True, tag="content_block_delta"):
    """The next part of a block."""

    index: int
    delta: BlockDelta


class ContentBlockStopEvent(Struct, frozen=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageDeltaEvent(Struct, frozen=True, tag="message_delta"):
    """After all blocks: the end and the whole usage."""

    delta: StopDelta
    usage: MessageUsage
    eventlm: EventlmReply | UnsetType = UNSET


class MessageStopEvent(Struct, frozen=True, tag="message_stop"):
    """Last."""


BlockEvent = Union[  # noqa: UP007
    ContentBlockStartEvent, PingEvent, ContentBlockDeltaEvent, ContentBlockStopEvent
]
#: All events of a stream, the error that ends one early among them.
MessageEvent = Union[  # noqa: UP007
    MessageStartEvent,
    ContentBlockStartEvent,
    PingEvent,
    ContentBlockDeltaEvent,
    ContentBlockStopEvent,
    MessageDeltaEvent,
    MessageStopEvent,
    ErrorReply,
]
