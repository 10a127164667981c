"""Messages of a conversation, checked, in the form in which chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.text.protocol import ROLES, ChatCompletionRequest, ChatMessage, ContentPart, MessageToolCall

#: Fields that only messages of one role have.
_ROLE_OF_FIELD = {"tool_calls": "assistant", "refusal": "assistant", "tool_call_id": "tool"}


def chat_messages(request: ChatCompletionRequest, *, knows_developer: bool = False) -> list[dict[str, Any]]:
    """The messages as a chat template sees them. Raises InputError for what it could not be given.

    `knows_developer`: the template has that role; to others developers speak as the system, which OpenAI renamed so.
    """
    if not request.messages:
        raise InputError("messages", "Invalid value for 'messages': at least one message is needed.")
    messages = [_chat_message(message, f"messages[{place}]") for place, message in enumerate(request.messages)]
    if not knows_developer:
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    return messages


def _chat_message(message: ChatMessage, param: str) -> dict[str, Any]:
    _check_role(message, param)
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message, param)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{param}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        # The name that most templates read, and that of gpt-oss; transformers gives both.
        rendered |= {"reasoning_content": reasoning, "thinking": reasoning}
    return rendered


def _check_role(message: ChatMessage, param: str) -> None:
    if message.role not in ROLES:
        known = ", ".join(f"'{role}'" for role in ROLES)
        raise InputError(f"{param}.role", f"Invalid value for '{param}.role': supported values are {known}.")
    for name, role in _ROLE_OF_FIELD.items():
        if getattr(message, name) and message.role != role:
            raise InputError(
                f"{param}.{name}", f"Invalid value for '{param}.{name}': only messages of the role '{role}' have it."
            )
    if message.role == "tool" and message.tool_call_id is None:
        raise MissingParameterError(f"{param}.tool_call_id")
    if message.function_call:
        raise InputError(
            f"{param}.function_call", f"'{param}.function_call' is not supported; write it as '{param}.tool_calls'."
        )


def _content(message: ChatMessage, param: str) -> str:
    """The text of a message. Only an assistant that calls a tool, refuses or was cut in its reasoning has none."""
    content = message.content
    if not content and message.refusal:
        return message.refusal
    if content is None:
        if message.tool_calls or (message.role == "assistant" and (message.reasoning_content or message.reasoning)):
            return ""
        raise InvalidTypeError(
            f"{param}.content", f"Invalid type for '{param}.content': expected a string or a list of parts, got null."
        )
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{param}.content[{place}]") for place, part in enumerate(content))


def _part_text(part: ContentPart, param: str) -> str:
    if part.type not in ("text", "refusal"):
        raise InputError(
            f"{param}.type",
            f"Invalid value for '{param}.type': this model takes text parts only, got '{part.type}'.",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidTypeError(f"{param}.{part.type}", f"Invalid type for '{param}.{part.type}': expected a string.")
    return text


def _tool_call(call: MessageToolCall, param: str) -> dict[str, Any]:
    if call.type != "function":
        raise InputError(
            f"{param}.type", f"Invalid value for '{param}.type': the supported value is 'function', got '{call.type}'."
        )
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """Templates write arguments out as JSON themselves. What a model wrote that is no object stays as it is."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
