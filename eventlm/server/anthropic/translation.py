"""From Anthropic's requests to chats."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from eventlm.errors import InputError, InvalidJsonError, MissingParameterError, PromptTooLongError
from eventlm.server.anthropic.protocol import (
    InputMessage,
    InputTool,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from eventlm.server.translation import native_fields
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.protocol import (
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    JsonSchemaFormat,
    MessageToolCall,
    ResponseFormat,
)
from eventlm.text.tools.formats import Formats

#: Fields that mean the same in both.
_SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "chat_template_kwargs",
)
#: How the types of tools begin that run at the client, but are defined only in Anthropic's models.
_CLIENT_TOOLS = ("bash_", "text_editor_", "computer_", "memory_", "browser_")
#: A line of Claude Code's, for Anthropic's servers. It differs in each request, so no two would share a prefix.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
#: Names of a chat's fields in errors, and those that they come from.
_OWN_NAMES = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function\.name": "tool_choice.name",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}
#: `reasoning_effort` of chat templates that know three of them.
_EFFORTS: dict[str, Literal["low", "medium", "high"]] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def chat_request(
    body: MessagesRequest, template: ChatTemplate | None, formats: Formats, *, forwards: bool = False
) -> ChatCompletionRequest:
    """The chat that a body asks for of a model with this template and formats, as long as the context allows. forwards:
    whether other servers run the model, which may then know any effort.

    Raises InputError.
    """
    messages = _messages(body)
    continues = bool(messages) and messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        path = f"messages[{len(body.messages) - 1}].content"
        raise InputError(path, f"Invalid value for '{path}': the last message calls tools; append their results.")
    shared: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    chat = ChatCompletionRequest(
        model=body.model,
        messages=messages,
        stop=body.stop_sequences,
        continue_final_message=continues,
        **shared,
    )
    _set_tools(chat, body)
    _set_thinking(chat, body, formats)
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and (forwards or (template is not None and "reasoning_effort" in template.source)):
        chat.reasoning_effort = _EFFORTS[effort]
    if (schema := body.reply_schema) is not None:
        chat.response_format = ResponseFormat("json_schema", JsonSchemaFormat(name="reply", schema=schema))
    return chat


@contextmanager
def own_errors() -> Iterator[None]:
    """Errors of the chat within are in the words of the body that it was made from."""
    with native_fields(_OWN_NAMES):
        try:
            yield
        except PromptTooLongError as error:
            if not error.num_tokens:
                raise
            # Clients look for these words before they shorten a conversation.
            message = f"prompt is too long: {error.num_tokens} tokens > {error.most_tokens} maximum"
            raise PromptTooLongError(error.param, message, error.num_tokens, error.most_tokens) from error


def _messages(body: MessagesRequest) -> list[ChatMessage]:
    """The messages of a chat. Consecutive ones of one role are one turn."""
    system = _BILLING_LINE.sub("", body.system) if isinstance(body.system, str) else _system_text(body.system or [])
    turns = [[ChatMessage("system", system)]] if system else []
    for index, message in enumerate(body.messages):
        for each in _translated(message, f"messages[{index}].content"):
            if turns and turns[-1][0].role == each.role != "tool":
                turns[-1].append(each)
            else:
                turns.append([each])
    return [_one_message(turn) for turn in turns]


def _system_text(blocks: list[TextBlock]) -> str:
    return _joined(*(_BILLING_LINE.sub("", block.text) for block in blocks))


def _joined(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def _one_message(turn: list[ChatMessage]) -> ChatMessage:
    """A turn of messages of one role as one."""
    if len(turn) == 1:
        return turn[0]
    return ChatMessage(
        turn[0].role,
        _joined(*(str(message.content) for message in turn)),
        tool_calls=[call for message in turn for call in message.tool_calls or []] or None,
        reasoning_content=_joined(*(message.reasoning_content for message in turn)) or None,
    )


def _translated(message: InputMessage, path: str) -> Iterator[ChatMessage]:
    """The messages of a chat for one of Anthropic's: there, results of calls are part of the user's message."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for index, block in enumerate(message.content):
        _check_role(block, message.role, f"{path}[{index}].type")
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(MessageToolCall(block.id, CalledFunction(block.name, _json(block.input))))
            case ToolResultBlock():
                if texts:
                    yield ChatMessage(message.role, _joined(*texts))
                    texts = []
                yield ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id)
    if texts or message.role == "assistant":
        reasoning = _joined(*thoughts) or None
        yield ChatMessage(message.role, _joined(*texts), tool_calls=calls or None, reasoning_content=reasoning)


def _check_role(block: Any, role: str, path: str) -> None:
    """Raise InputError for a block that no message of this role has."""
    match block:
        case ToolUseBlock() | ThinkingBlock() | RedactedThinkingBlock():
            owner = "assistant"
        case ToolResultBlock():
            owner = "user"
        case _:
            return
    if role != owner:
        type_ = block.__struct_config__.tag
        raise InputError(
            path, f"Invalid value for '{path}': only messages of the role '{owner}' have '{type_}' blocks."
        )


def _result(block: ToolResultBlock) -> str:
    texts = block.content if isinstance(block.content, list) else [TextBlock(block.content or "")]
    text = _joined(*(each.text for each in texts))
    return f"Error: {text}" if block.is_error else text


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise InvalidJsonError("it is nested too deeply") from error


def _set_tools(chat: ChatCompletionRequest, body: MessagesRequest) -> None:
    if body.tools:
        chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is not None:
        chat.tool_choice = _tool_choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use


def _tool(tool: InputTool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        problem = (
            "only Anthropic's models know how it is defined; give it"
            if tool.type.startswith(_CLIENT_TOOLS)
            else "it runs on Anthropic's servers; run it at the client and give it"
        )
        raise InputError(
            f"{path}.type",
            f"Invalid value for '{path}.type': '{tool.type}' is not supported, because {problem} a 'name', a "
            "'description' and an 'input_schema', without 'type'.",
        )
    if tool.name is None:
        raise MissingParameterError(f"{path}.name")
    if tool.input_schema is None:
        raise MissingParameterError(f"{path}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.description is None:
        del function["description"]
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise MissingParameterError("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _set_thinking(chat: ChatCompletionRequest, body: MessagesRequest, formats: Formats) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    # The names that templates have for it.
    switches = {"enable_thinking": thinking.is_on, "thinking": thinking.is_on}
    chat.chat_template_kwargs = switches | (chat.chat_template_kwargs or {})
    # Some models reason whatever the template says.
    chat.include_reasoning = thinking.is_on
    # Agents ask any model to reason, those that do not among them.
    if thinking.type == "enabled" and formats.reasoning is not None:
        chat.thinking_token_budget = thinking.budget_tokens
