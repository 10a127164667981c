"""Conversations: their messages, checked and in the form that chat templates take, and their prompts."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

import msgspec

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.text.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplateError, TemplateSource
from eventlm.text.protocol import ROLE_PATTERN, ROLES, ChatCompletionRequest, ChatMessage, ContentPart, MessageToolCall
from eventlm.text.tools.formats import ToolFormat
from eventlm.text.tools.tool_prompt import write_tools_as_text

#: What a role may be.
ROLES_TO_USE = f"it must be {', '.join(map(repr, ROLES))} or another word that the chat template knows"
#: Fields of messages of one role only.
_ROLE_OF_FIELD = {"tool_calls": "assistant", "refusal": "assistant", "tool_call_id": "tool"}


def render_chat(
    body: ChatCompletionRequest,
    template: ChatTemplate,
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_format: ToolFormat | None = None,
    param: str = "messages",
) -> str:
    """The prompt of a conversation, by the model's template. Raises InputError. See `template_arguments`."""
    arguments = template_arguments(body, template, tools=tools, tool_format=tool_format, param=param)
    try:
        text = template.render(**arguments)
    except ChatTemplateError as error:
        raise _refused_by_template(body, error, param) from error
    check_rendered_roles(body, text, param)
    return text


def template_arguments(
    body: ChatCompletionRequest,
    template: TemplateSource,
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_format: ToolFormat | None = None,
    param: str = "messages",
) -> dict[str, Any]:
    """What `ChatTemplate.render` takes. Raises InputError.

    tools: the definitions of those that can be called. tool_format: how they are written in the messages where the
    template does not know of any. param: where the body has the messages.
    """
    messages = chat_messages(body, knows_developer=template.knows_developer, param=param)
    _check_spelling(body, template, param)
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
    except RecursionError as error:
        raise InputError(param, "Tools or their calls are nested too deeply.") from error
    return {
        "messages": messages,
        "tools": tools,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "variables": _variables(template, body),
    }


def _check_spelling(body: ChatCompletionRequest, template: TemplateSource, param: str) -> None:
    """Raise InputError for a role such as `assitant`, unless the template names it."""
    for index, message in enumerate(body.messages):
        if message.role in ROLES or message.role in template.source:
            continue
        if meant := difflib.get_close_matches(message.role.lower(), ROLES, n=1, cutoff=0.8):
            at = f"{param}[{index}].role"
            raise InputError(at, f"Invalid value for '{at}': {ROLES_TO_USE}; did you mean '{meant[0]}'?")


def _refused_by_template(body: ChatCompletionRequest, error: ChatTemplateError, param: str) -> InputError:
    """The error for a conversation that the template refused, at the first role that only a template can know."""
    index = next((index for index, message in enumerate(body.messages) if message.role not in ROLES), None)
    at = param if index is None else f"{param}[{index}].role"
    # The template's own message may be a sentence.
    return InputError(at, f"Invalid value for '{at}': {str(error).removesuffix('.')}.")


def check_rendered_roles(body: ChatCompletionRequest, text: str, param: str = "messages") -> None:
    """Raise InputError for a message that the template left out of the text because it does not know its role."""
    for index, message in enumerate(body.messages):
        if message.role in ROLES:
            continue
        content = _content(message, f"{param}[{index}]").strip()
        # Llama's template writes results of tools as JSON.
        if not any(form in text for form in (content, json.dumps(content, ensure_ascii=False)[1:-1])):
            at = f"{param}[{index}].role"
            raise InputError(
                at,
                f"Invalid value for '{at}': the chat template leaves out messages of the role '{message.role}'; "
                f"{ROLES_TO_USE}.",
            )


def reads_effort(template: TemplateSource) -> bool:
    """Whether a `reasoning_effort` changes what a template makes."""
    return "reasoning_effort" in template.source or "enable_thinking" in template.source


def _variables(template: TemplateSource, body: ChatCompletionRequest) -> dict[str, Any]:
    """What the body sets of the template's own variables. Raises InputError."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise InputError(param, f"Invalid value for '{param}': this variable is reserved.")
    effort = body.reasoning_effort
    if effort is None:
        return variables
    # As in vLLM, any effort but none turns the reasoning on where a template has a switch for it.
    asked = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    read = {name: value for name, value in asked.items() if name in template.source}
    if not read and effort != "none":
        raise InputError(
            "reasoning_effort",
            "'reasoning_effort' is not supported by this model: its chat template does not read it; leave it out.",
        )
    return read | variables


def echoed_text(body: ChatCompletionRequest) -> str:
    """What the reply begins with: the last message, if the body wants that and it has the reply's role."""
    last = body.messages[-1]
    return _content(last, "messages[-1]") if body.echo and last.role == body.reply_role else ""


def chat_messages(
    request: ChatCompletionRequest, *, knows_developer: bool = False, param: str = "messages"
) -> list[dict[str, Any]]:
    """The messages, which the body has at `param`, in the form that chat templates take. Raises InputError.

    `knows_developer`: the template has that role. Otherwise it becomes `system`, its older name.
    """
    if not request.messages:
        raise InputError(param, f"Invalid value for '{param}': at least one message is needed.")
    messages = [_chat_message(message, f"{param}[{index}]") for index, message in enumerate(request.messages)]
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
    if message.role not in ROLES and not re.match(ROLE_PATTERN, message.role):
        raise InputError(f"{param}.role", f"Invalid value for '{param}.role': {ROLES_TO_USE}.")
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
