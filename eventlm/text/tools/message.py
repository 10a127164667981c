"""From an assistant's text to its message: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from eventlm.engine.request import Request
from eventlm.text.tools.formats import Formats, ReasoningState
from eventlm.text.tools.pieces import CallArguments, CallBegins, Content, Piece, Reasoning, TextMachine


class MessageFormat(Struct, frozen=True, kw_only=True):
    """What one request's replies may consist of.

    tool_names: those that can be called; none: no calls are looked for. one_call: the message ends behind the first.
    is_forced: there is nothing but calls behind the reasoning. is_named: the call was forced by its name. reasoning:
    what the text begins with. shows_reasoning: else it is left out of the reply. ends_behind_call: the text goes on
    behind the only call unless it is ended there (a grammar ends by itself).
    """

    tool_names: tuple[str, ...] = ()
    one_call: bool = False
    is_forced: bool = False
    is_named: bool = False
    reasoning: ReasoningState = "closed"
    shows_reasoning: bool = True
    ends_behind_call: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.tool_names and self.reasoning == "closed"


#: All text is content.
PLAIN = MessageFormat()


def message_format(request: Request) -> MessageFormat:
    """The format that a request carries."""
    return msgspec.msgpack.decode(request.message_format, type=MessageFormat) if request.message_format else PLAIN


class CallDelta(Struct):
    """What is new of the call at place `index` of the message; `name` comes first and once, else it is empty."""

    index: int
    name: str
    arguments: str


class MessageDelta(Struct):
    """What is new of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, later: MessageDelta) -> None:
        """Take in what came next."""
        self.content += later.content
        self.reasoning += later.reasoning
        for call in later.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class MessageParser:
    """One message, from its text. The joined deltas do not depend on how the text was cut."""

    def __init__(self, format: MessageFormat, formats: Formats) -> None:
        self._format = format
        self._reasoning: TextMachine | None = None
        self._tools: TextMachine | None = None
        if formats.reasoning is not None and format.reasoning != "closed":
            self._reasoning = formats.reasoning.parser(is_open=format.reasoning == "open")
        if formats.tools is not None and format.tool_names:
            self._tools = formats.tools.parser(frozenset(format.tool_names))
        self.num_calls = 0
        self._num_complete_calls = 0
        #: Set behind the only call that is wanted: what comes then is not part of the message.
        self.is_over = False

    @property
    def calls_are_complete(self) -> bool:
        """Whether no call was cut short by the end of the text."""
        return self._num_complete_calls == self.num_calls

    def push(self, text: str) -> MessageDelta:
        """What the next piece of the text makes certain."""
        delta = MessageDelta()
        if self._reasoning is None:
            self._take_content(text, delta)
        else:
            self._take(self._reasoning.push(text), delta)
        return delta

    def close(self) -> MessageDelta:
        """The rest, at the end of the text."""
        delta = MessageDelta()
        if self._reasoning is not None:
            self._take(self._reasoning.close(), delta)
        if self._tools is not None:
            self._take_calls(self._tools.close(), delta)
        if self._format.is_forced:
            # What was held back is the head of a call that was cut short: no words for the user.
            delta.content = ""
        return delta

    def _take(self, pieces: list[Piece], delta: MessageDelta) -> None:
        for piece in pieces:
            if isinstance(piece, Content):
                self._take_content(piece.text, delta)
            elif isinstance(piece, Reasoning) and self._format.shows_reasoning:
                delta.reasoning += piece.text

    def _take_content(self, text: str, delta: MessageDelta) -> None:
        if self._tools is None:
            delta.content += text
        else:
            self._take_calls(self._tools.push(text), delta)

    def _take_calls(self, pieces: list[Piece], delta: MessageDelta) -> None:
        for piece in pieces:
            if self.is_over:
                return
            if isinstance(piece, Content):
                delta.content += piece.text
            elif isinstance(piece, CallBegins):
                delta.calls.append(CallDelta(self.num_calls, piece.name, ""))
                self.num_calls += 1
            elif isinstance(piece, CallArguments):
                self._add_arguments(piece.text, delta)
            else:
                self._num_complete_calls += 1
                self.is_over = self._format.one_call

    def _add_arguments(self, text: str, delta: MessageDelta) -> None:
        index = self.num_calls - 1
        if not delta.calls or delta.calls[-1].index != index:
            delta.calls.append(CallDelta(index, "", ""))
        delta.calls[-1].arguments += text


def parse_message(text: str, format: MessageFormat, formats: Formats) -> tuple[MessageDelta, MessageParser]:
    """A whole text's message, and what read it."""
    parser = MessageParser(format, formats)
    message = parser.push(text)
    message.add(parser.close())
    return message, parser


def end_of_call(format: MessageFormat, formats: Formats) -> Callable[[str], bool]:
    """A new function that is told a text in pieces, and is true once the only call that is wanted is complete."""
    parser = MessageParser(format, formats)

    def is_over(text: str) -> bool:
        parser.push(text)
        return parser.is_over

    return is_over
