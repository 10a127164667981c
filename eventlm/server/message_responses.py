"""Messages and their deltas in the shapes of the replies."""

from __future__ import annotations

from hashlib import blake2b

from msgspec import UNSET

from eventlm.server.responses import (
    ChatDelta,
    ChatReplyMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from eventlm.text.tools.message import MessageDelta


def call_id(reply_id: str, choice: int, call: int) -> str:
    """The id of a call, the same whenever the reply is made from its tokens again."""
    return f"call_{blake2b(f'{reply_id}/{choice}/{call}'.encode(), digest_size=12).hexdigest()}"


def reply_message(message: MessageDelta, reply_id: str, choice: int) -> ChatReplyMessage:
    """A whole message."""
    calls = [
        ToolCall(id=call_id(reply_id, choice, call.index), function=FunctionCall(call.name, call.arguments))
        for call in message.calls
    ]
    reasoning = message.reasoning or UNSET
    return ChatReplyMessage(
        message.content or (None if calls else ""),
        tool_calls=calls or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )


def message_delta(message: MessageDelta, reply_id: str, choice: int) -> ChatDelta:
    """What is new of a message."""
    calls = [
        ToolCallDelta(
            index=call.index,
            id=call_id(reply_id, choice, call.index) if call.name else UNSET,
            type="function" if call.name else UNSET,
            function=FunctionCallDelta(call.arguments, call.name or UNSET),
        )
        for call in message.calls
    ]
    reasoning = message.reasoning or UNSET
    says_nothing_else = not calls and not message.reasoning
    return ChatDelta(
        content=message.content if message.content or says_nothing_else else UNSET,
        tool_calls=calls or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )
