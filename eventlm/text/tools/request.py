"""What a chat's tools and reasoning mean for its request to the engine."""

from __future__ import annotations

import msgspec

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.call_grammar import reply_grammar
from eventlm.text.tools.definitions import ToolUse, tool_use
from eventlm.text.tools.formats import Formats, ReasoningState
from eventlm.text.tools.message import MessageFormat

#: Enough to see how a prompt ends, even where each token is a character.
_NUM_LAST_TOKENS = 32


def requested_tools(body: ChatCompletionRequest, formats: Formats) -> ToolUse | None:
    """What the body says of tools; None if none can be called. Raises InputError."""
    use = tool_use(body)
    if use is not None and formats.tools is None:
        raise InputError(
            "tools",
            "This model's chat template shows no format of tool calls that is known; leave 'tools' out, or start the "
            "server with --tool-parser NAME.",
        )
    return use


def requested_format(
    body: ChatCompletionRequest,
    use: ToolUse | None,
    formats: Formats,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
) -> MessageFormat:
    """What the replies may consist of."""
    return MessageFormat(
        tool_names=use.names if use is not None else (),
        one_call=use is not None and use.one_call,
        is_forced=use is not None and use.mode != "auto",
        is_named=use is not None and use.mode == "named",
        reasoning=_reasoning(body, formats, tokenizer, prompt_token_ids),
        shows_reasoning=body.include_reasoning is not False,
        ends_behind_call=use is not None and use.one_call and use.mode == "auto",
    )


def _reasoning(
    body: ChatCompletionRequest, formats: Formats, tokenizer: Tokenizer, prompt_token_ids: list[int]
) -> ReasoningState:
    if formats.reasoning is None or body.separate_reasoning is False:
        return "closed"
    if body.continue_final_message:
        content = body.messages[-1].content
        text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content or [])
        return formats.reasoning.state_within(text)
    return formats.reasoning.state(tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:]))


async def requested_grammar(
    use: ToolUse | None,
    format: MessageFormat,
    formats: Formats,
    tokenizer: Tokenizer,
    content: str,
    checker: GrammarChecker,
) -> str:
    """The grammar of the whole reply, given that of its content; empty if anything goes. Raises InputError."""
    marks = frozenset(_special_marks(formats, tokenizer).values())
    return await reply_grammar(use, formats, format.reasoning, marks, content, checker)


def with_format(request: Request, format: MessageFormat, formats: Formats, tokenizer: Tokenizer) -> Request:
    """The request, carrying what its edge needs to find the message in the text."""
    if format.is_plain:
        return request
    request = msgspec.structs.replace(
        request,
        message_format=msgspec.msgpack.encode(format),
        visible_token_ids=tuple(_special_marks(formats, tokenizer)),
    )
    return request.with_scheduling(has_text_ends=True) if format.ends_behind_call else request


def _special_marks(formats: Formats, tokenizer: Tokenizer) -> dict[int, str]:
    """The marks of the formats that are special tokens of the vocabulary, by their ids."""
    marks = [mark for format in formats if format is not None for mark in format.marks if mark]
    by_bytes = {mark.encode(): mark for mark in marks}
    return {token_id: by_bytes[data] for token_id, data in tokenizer.special_bytes.items() if data in by_bytes}
