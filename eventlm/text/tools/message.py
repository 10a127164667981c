"""From an assistant's text to its message: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

import msgspec
from msgspec import Struct

from eventlm.engine.backend import AnswerDelta, CallPart
from eventlm.engine.request import Request
from eventlm.text.choice_output import ChoiceOutput, api_finish_reason
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.definitions import ToolUse
from eventlm.text.tools.formats import Formats, ReasoningState
from eventlm.text.tools.parser_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    ParserEvent,
    Reasoning,
    StreamParser,
)

#: Enough to see how a prompt ends, even where each token is a character.
_NUM_LAST_TOKENS = 32


class MessageFormat(Struct, frozen=True, kw_only=True):
    """What one request's replies may consist of.

    tool_names: the callable tools; without any, no calls are looked for. one_call: the message ends after the first
    call. is_forced: only calls may follow the reasoning. is_named: the call was forced by its name. reasoning: whether
    the text begins with some. shows_reasoning: otherwise the reply leaves it out. ends_after_call: the engine must end
    the text after the only call (a grammar ends by itself).
    """

    tool_names: tuple[str, ...] = ()
    one_call: bool = False
    is_forced: bool = False
    is_named: bool = False
    reasoning: ReasoningState = "closed"
    shows_reasoning: bool = True
    ends_after_call: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.tool_names and self.reasoning == "closed"


#: All text is content.
PLAIN = MessageFormat()


def requested_format(
    body: ChatCompletionRequest,
    use: ToolUse | None,
    formats: Formats,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
) -> MessageFormat:
    """What the replies to a body may consist of."""
    return MessageFormat(
        tool_names=use.names if use is not None else (),
        one_call=use is not None and use.one_call,
        is_forced=use is not None and use.mode != "auto",
        is_named=use is not None and use.mode == "named",
        reasoning=_reasoning(body, formats, tokenizer, prompt_token_ids),
        shows_reasoning=body.include_reasoning is not False,
        ends_after_call=use is not None and use.one_call and use.mode == "auto",
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


def message_format(request: Request) -> MessageFormat:
    """The format that a request carries."""
    return msgspec.msgpack.decode(request.message_format, type=MessageFormat) if request.message_format else PLAIN


class CallDelta(Struct):
    """The next part of call number `index` of the message. Only the first part has the `name`."""

    index: int
    name: str
    arguments: str


#: One part of a message, among others in their order.
MessagePart = Union[Content, Reasoning, CallDelta, CallEnd]  # noqa: UP007


class MessageDelta(Struct):
    """The next part of a message, without the order of what it has."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, later: MessageDelta) -> None:
        """Append the part that follows."""
        self.content += later.content
        self.reasoning += later.reasoning
        for call in later.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class MessageParser:
    """One message, from its text, or from what a backend has found in it. The joined deltas do not depend on how the
    text was cut.
    """

    def __init__(self, format: MessageFormat, formats: Formats) -> None:
        self._format = format
        self._reasoning: StreamParser | None = None
        self._tools: StreamParser | None = None
        if formats.reasoning is not None and format.reasoning != "closed":
            self._reasoning = formats.reasoning.parser(is_open=format.reasoning == "open")
        if formats.tools is not None and format.tool_names:
            self._tools = formats.tools.parser(frozenset(format.tool_names))
        self.num_calls = 0
        self._num_complete_calls = 0
        #: Set after the only call that is wanted. Text from here on is not part of the message.
        self.is_over = False
        #: Whether a call that a backend has found goes on.
        self._has_open_call = False

    @property
    def calls_are_complete(self) -> bool:
        """Whether no call was cut short by the end of the text."""
        return self._num_complete_calls == self.num_calls

    def take(self, output: ChoiceOutput) -> list[MessagePart]:
        """What the next output of a choice makes certain, in the order of the text; the rest too if it is the last."""
        parts = self.parts(output.text) if output.delta is None else self._found(output.delta)
        if output.finished is not None:
            parts += self.last_parts()
            if api_finish_reason(output.finished.reason) != "length":
                self._end_call(parts)
        return parts

    def message(self, output: ChoiceOutput) -> MessageDelta:
        """What `take` returns, without its order."""
        return _delta(self.take(output))

    def push(self, text: str) -> MessageDelta:
        """The part of the message that the next piece of text makes certain."""
        return _delta(self.parts(text))

    def close(self) -> MessageDelta:
        """The rest, at the end of the text."""
        return _delta(self.last_parts())

    def parts(self, text: str) -> list[MessagePart]:
        """What `push` returns, in the order of the text."""
        parts: list[MessagePart] = []
        if self._reasoning is None:
            self._take_content(text, parts)
        else:
            self._take(self._reasoning.push(text), parts)
        return parts

    def last_parts(self) -> list[MessagePart]:
        """What `close` returns, in the order of the text."""
        parts: list[MessagePart] = []
        if self._reasoning is not None:
            self._take(self._reasoning.close(), parts)
        if self._tools is not None:
            self._take_calls(self._tools.close(), parts)
        if self._format.is_forced:
            # The text held back is the start of a call that was cut short, not content.
            return [part for part in parts if not isinstance(part, Content)]
        return parts

    def _found(self, delta: AnswerDelta) -> list[MessagePart]:
        """The parts that a backend has found."""
        parts: list[MessagePart] = []
        if delta.reasoning and self._format.shows_reasoning:
            parts.append(Reasoning(delta.reasoning))
        if delta.text:
            parts.append(Content(delta.text))
        for call in delta.calls:
            self._take_call(call, parts)
        return parts

    def _take_call(self, call: CallPart, parts: list[MessagePart]) -> None:
        if call.name:
            self._end_call(parts)
            self._has_open_call = True
            parts.append(CallDelta(self.num_calls, call.name, call.arguments))
            self.num_calls += 1
        elif self._has_open_call:
            self._add_arguments(call.arguments, parts)

    def _end_call(self, parts: list[MessagePart]) -> None:
        """End the call that a backend has found last, if it goes on."""
        if not self._has_open_call:
            return
        self._has_open_call = False
        self._num_complete_calls += 1
        parts.append(CallEnd())

    def _take(self, events: list[ParserEvent], parts: list[MessagePart]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._take_content(event.text, parts)
            elif isinstance(event, Reasoning) and self._format.shows_reasoning:
                parts.append(event)

    def _take_content(self, text: str, parts: list[MessagePart]) -> None:
        if self._tools is not None:
            self._take_calls(self._tools.push(text), parts)
        elif text:
            parts.append(Content(text))

    def _take_calls(self, events: list[ParserEvent], parts: list[MessagePart]) -> None:
        for event in events:
            if self.is_over:
                return
            if isinstance(event, Content):
                parts.append(event)
            elif isinstance(event, CallStart):
                parts.append(CallDelta(self.num_calls, event.name, ""))
                self.num_calls += 1
            elif isinstance(event, CallArguments):
                self._add_arguments(event.text, parts)
            else:
                self._num_complete_calls += 1
                self.is_over = self._format.one_call
                parts.append(CallEnd())

    def _add_arguments(self, text: str, parts: list[MessagePart]) -> None:
        last = parts[-1] if parts else None
        if isinstance(last, CallDelta):
            last.arguments += text
        else:
            parts.append(CallDelta(self.num_calls - 1, "", text))


def _delta(parts: list[MessagePart]) -> MessageDelta:
    """The parts of each kind together."""
    delta = MessageDelta()
    for part in parts:
        if isinstance(part, Content):
            delta.content += part.text
        elif isinstance(part, Reasoning):
            delta.reasoning += part.text
        elif isinstance(part, CallDelta):
            delta.calls.append(part)
    return delta


def end_of_call(format: MessageFormat, formats: Formats) -> Callable[[str], bool]:
    """A new function that takes a text in pieces and returns True once the only wanted call is complete."""
    parser = MessageParser(format, formats)

    def is_over(text: str) -> bool:
        parser.push(text)
        return parser.is_over

    return is_over
