"""Conversations: their messages, checked and in the form that chat templates take, and their prompts."""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.text.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplateError
from eventlm.text.protocol import ROLES, ChatCompletionRequest, ChatMessage, ContentPart, MessageToolCall
from eventlm.text.tools.formats import ToolFormat
from eventlm.text.tools.tool_prompt import write_tools_as_text

#: Fields of messages of one role only.
_ROLE_OF_FIELD = {"tool_calls": "assistant", "refusal": "assistant", "tool_call_id": "tool"}


def render_chat(
    body: ChatCompletionRequest,
    template: ChatTemplate,
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_format: ToolFormat | None = None,
) -> str:
    """The prompt of a conversation. Raises InputError.

    tools: the definitions of those that can be called. tool_format: how they are written in the messages where the
    template does not know of any.
    """
    messages = chat_messages(body, knows_developer=template.knows_developer)
    if body.documents and "documents" not in template.source:
        raise InputError(
            "documents",
            "'documents' are not supported by this model: its chat template does not read them; write them into a "
            "message.",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InputError(
            "continue_final_message",
            "'continue_final_message' and 'add_generation_prompt' exclude each other: the one goes on with the "
            "last message, the other begins a new one.",
        )
    try:
        if tool_format is not None and not template.knows_tools:
            messages = write_tools_as_text(messages, tools or [], tool_format.syntax)
        return template.render(
            messages,
            tools=tools,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=_variables(template, body),
        )
    except RecursionError as error:
        raise InputError("messages", "Tools or their calls are nested too deeply.") from error
    except ChatTemplateError as error:
        raise InputError("messages", f"Invalid value for 'messages': {error}.") from error


def _variables(template: ChatTemplate, body: ChatCompletionRequest) -> dict[str, Any]:
    """What the body sets of the template's own variables. Raises InputError."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise InputError(param, f"Invalid value for '{param}': this variable is reserved.")
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" in template.source:
        variables["reasoning_effort"] = effort
    elif effort not in (None, "none"):
        raise InputError(
            "reasoning_effort",
            "'reasoning_effort' is not supported by this model: its chat template does not read it; leave it out.",
        )
    return variables


def chat_messages(request: ChatCompletionRequest, *, knows_developer: bool = False) -> list[dict[str, Any]]:
    """The messages in the form that chat templates take. Raises InputError.

    `knows_developer`: the template has that role. Otherwise it becomes `system`, its older name.
    """
    if not request.messages:
        raise InputError("messages", "Invalid value for 'messages': at least one message is needed.")
    messages = [_chat_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]
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
            _tool_call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
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
    """The text of a message. Only an assistant's may be empty: with a tool call, a refusal or cut reasoning."""
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
    return "\n".join(_part_text(part, f"{param}.content[{index}]") for index, part in enumerate(content))


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
    """The arguments as an object, which templates write as JSON; unchanged if they are not an object."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
