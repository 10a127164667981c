"""The prompt of a response: its instructions, what came before and its input, shortened if it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eventlm.engine.request import Request
from eventlm.errors import InputError, MissingParameterError, PromptTooLongError
from eventlm.server.api import Caller
from eventlm.server.context import ServerContext
from eventlm.server.responses.history import resolved
from eventlm.server.responses.items import ItemMessages, input_items, is_reference
from eventlm.server.responses.protocol import InputFields, InputItem
from eventlm.server.responses.translation import chat_request, may_be_lenient, native_names
from eventlm.text.chat.messages import reads_effort
from eventlm.text.protocol import ChatCompletionRequest, ChatMessage

#: Roles of messages that `truncation` keeps.
_KEPT_ROLES = ("system", "developer")


class PromptMessages(NamedTuple):
    """The messages of a prompt, and the path of what each comes from."""

    messages: list[ChatMessage]
    params: list[str]

    def after(self, num_dropped: int) -> PromptMessages:
        """The conversation without its first messages, except for instructions."""
        kept, left = [], num_dropped
        for index, message in enumerate(self.messages):
            if message.role in _KEPT_ROLES or left == 0:
                kept.append(index)
            else:
                left -= 1
        return PromptMessages([self.messages[index] for index in kept], [self.params[index] for index in kept])


async def read_conversation(
    context: ServerContext, body: InputFields, caller: Caller, earlier: Sequence[InputItem]
) -> PromptMessages:
    """The conversation of a body after earlier items. References in the body are replaced by what they stand for.

    Raises InputError or ApiError.
    """
    items = input_items(body.input)
    if not items and not earlier:
        if body.input is None:
            raise MissingParameterError("input")
        raise InputError("input", "Invalid value for 'input': it is empty.")
    if any(map(is_reference, items)):
        body.input = items = await resolved(context, items, caller.principal.owner, "input")
    found = ItemMessages()
    found.add_all(earlier, "previous_response_id" if body.conversation is None else "conversation")
    found.add_all(items, "input")
    if not found.messages:
        raise InputError(
            "input",
            "Invalid value for 'input': it has nothing that the model can read, since only the server that encrypted "
            "reasoning can read it; send a message too.",
        )
    return _with_instructions(PromptMessages(found.messages, found.params), body.instructions)


async def make_request(
    context: ServerContext,
    body: InputFields,
    conversation: PromptMessages,
    model: str,
    received_ns: int,
    scheduling: Mapping[str, Any],
) -> Request:
    """The request of a conversation, shortened if it is too long and may be. Raises InputError."""

    async def make(conversation: PromptMessages) -> Request:
        chat = _chat(context, body, conversation, model)
        try:
            return await context.requests.chat(chat, received_ns, **scheduling)
        except InputError as error:
            if not may_be_lenient(body, error):
                raise
        chat = _chat(context, body, conversation, model, default_strict=False)
        return await context.requests.chat(chat, received_ns, **scheduling)

    with native_names(conversation.params):
        try:
            return await make(conversation)
        except PromptTooLongError:
            shorter = await _shortened(context, body, conversation, model) if body.truncation == "auto" else None
            if shorter is None:
                raise
    with native_names(shorter.params):
        return await make(shorter)


async def count_tokens(context: ServerContext, body: InputFields, conversation: PromptMessages, model: str) -> int:
    """How many tokens the prompt of a conversation has. Raises InputError."""
    with native_names(conversation.params):
        num_tokens = await _num_tokens(context, body, conversation, model)
        if body.truncation == "auto" and num_tokens > _most_tokens(context, body):
            shorter = await _shortened(context, body, conversation, model)
            if shorter is not None:
                num_tokens = await _num_tokens(context, body, shorter, model)
        return num_tokens


def _with_instructions(conversation: PromptMessages, instructions: str | None) -> PromptMessages:
    """Instructions come first. Many templates take one message of the kind, so a first one like that joins them."""
    if not instructions:
        return conversation
    messages, params = conversation
    role, text, rest = "system", instructions, 0
    if messages[0].role in _KEPT_ROLES:
        content = messages[0].content
        joined = content if isinstance(content, str) else "\n".join(part.text or "" for part in content or ())
        role, text, rest = messages[0].role, f"{instructions}\n\n{joined}", 1
    return PromptMessages([ChatMessage(role=role, content=text), *messages[rest:]], ["instructions", *params[rest:]])


def _chat(
    context: ServerContext, body: InputFields, conversation: PromptMessages, model: str, *, default_strict: bool = True
) -> ChatCompletionRequest:
    """The chat of a conversation. Clients send an effort to any model: one that knows none takes no notice."""
    chat = chat_request(body, conversation.messages, model, default_strict=default_strict)
    template = context.tokenizer.chat_template
    if template is not None and not reads_effort(template):
        chat.reasoning_effort = None
    return chat


async def _shortened(
    context: ServerContext, body: InputFields, conversation: PromptMessages, model: str
) -> PromptMessages | None:
    """The longest end of a conversation that fits; None if none does.

    It begins with a user's message if it can, and never with the output of a call that is gone.
    """
    droppable = [message.role for message in conversation.messages if message.role not in _KEPT_ROLES]
    cuts = [number for number, role in enumerate(droppable) if number and role != "tool"]
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, body, conversation.after(cuts[middle]), model):
            high = middle
        else:
            low = middle + 1
    fitting = cuts[low:]
    if not fitting:
        return None
    return conversation.after(next((cut for cut in fitting if droppable[cut] == "user"), fitting[0]))


async def _fits(context: ServerContext, body: InputFields, conversation: PromptMessages, model: str) -> bool:
    try:
        return await _num_tokens(context, body, conversation, model) <= _most_tokens(context, body)
    except InputError:
        # Templates refuse some beginnings.
        return False


def _most_tokens(context: ServerContext, body: InputFields) -> int:
    """The longest prompt that leaves room for the output."""
    return context.engine.max_model_len - (body.max_output_tokens or 1)


async def _num_tokens(context: ServerContext, body: InputFields, conversation: PromptMessages, model: str) -> int:
    chat = _chat(context, body, conversation, model)
    return len(await context.requests.encode_messages(chat))
