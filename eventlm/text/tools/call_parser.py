"""Finds tool calls in a text: JSON objects between tags, or without tags at its start."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from msgspec import Struct

from eventlm.text.tools.call_scanner import WHITESPACE, CallScanner
from eventlm.text.tools.parser_events import (
    CallArguments,
    CallEnd,
    Content,
    ParserEvent,
    StreamParser,
    partial_suffix,
)

#: Between a call and its end tag; models are known to close one bracket too many.
_BEFORE_END = WHITESPACE + "}"
_BEFORE_NEXT = re.compile(rf"[{WHITESPACE}]*(?:;[{WHITESPACE}]*)?")


class CallSyntax(Struct, frozen=True, kw_only=True):
    """How a family of models writes calls.

    begin, end: tags around each call; without `end` a call ends with its object. arguments_key: key of the arguments.
    is_bare: calls may lack `begin` at the start of the text and after another call. layout: the text around an object
    that a grammar writes; separator: the text between two such calls.
    """

    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    is_bare: bool = False
    layout: tuple[str, str]
    separator: str


class CallParser(StreamParser):
    """Text before, between and after calls is content. So is an object that is not a call.

    An object is a call if it names one of the tools `names` and is well-formed up to its arguments. From there on it
    remains a call: arguments that are not JSON are passed on as they are, up to the end tag. Whitespace beside calls
    is not content.
    """

    def __init__(self, syntax: CallSyntax, names: Container[str]) -> None:
        self._syntax = syntax
        self._names = names
        self._state: Literal["outside", "call", "broken", "after"] = "outside"
        self._events: list[ParserEvent] = []
        #: Text that is still ambiguous.
        self._pending = ""
        #: Whether an object may begin here without a tag.
        self._may_begin = syntax.is_bare
        self._is_after_call = False
        self._scanner = CallScanner(names)
        #: The text since the end of the content, in case it is no call.
        self._held: list[str] = []

    def push(self, text: str) -> list[ParserEvent]:
        self._pending += text
        step = True
        while step and self._pending:
            match self._state:
                case "outside":
                    step = self._outside()
                case "call":
                    step = self._call()
                case "broken":
                    step = self._broken()
                case "after":
                    step = self._after_tagged() if self._syntax.end else self._after_bare()
        events, self._events = self._events, []
        return events

    def close(self) -> list[ParserEvent]:
        rest, self._pending = self._pending, ""
        match self._state:
            case "outside":
                if rest.strip(WHITESPACE) or not self._is_after_call:
                    self._emit_content(rest)
            case "call":
                if not self._scanner.has_begun:
                    self._emit_content("".join(self._held))
            case "broken":
                self._emit_arguments(rest)
            case "after":
                # Whitespace, a separator, or part of the end tag.
                pass
        events, self._events = self._events, []
        return events

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._is_after_call = False
            self._may_begin = False

    # Each step takes what it can from the pending text and returns whether another step may follow.

    def _outside(self) -> bool:
        text, tag = self._pending, self._syntax.begin
        if self._may_begin:
            stripped = text.lstrip(WHITESPACE)
            if stripped.startswith("{"):
                self._enter(len(text) - len(stripped))
                return True
            self._may_begin = not stripped or tag.startswith(stripped)
        start = text.find(tag)
        if start >= 0:
            end_of_content = len(text[:start].rstrip(WHITESPACE))
            self._emit_content(text[:end_of_content])
            self._pending = text[end_of_content:]
            self._enter(start - end_of_content + len(tag))
            return True
        safe = len(text[: len(text) - partial_suffix(text, tag)].rstrip(WHITESPACE))
        self._emit_content(text[:safe])
        self._pending = text[safe:]
        return False

    def _enter(self, num_held: int) -> None:
        """A call may begin after so many characters, which are content only if it is none."""
        self._held = [self._pending[:num_held]]
        self._pending = self._pending[num_held:]
        self._scanner = CallScanner(self._names)
        self._state = "call"

    def _call(self) -> bool:
        text, scanner = self._pending, self._scanner
        end = scanner.push(text, 0)
        self._pending = text[end:]
        if scanner.has_begun:
            self._held = []
        else:
            self._held.append(text[:end])
        self._events += scanner.events
        scanner.events = []
        match scanner.outcome:
            case "ended":
                self._state = "after"
                self._is_after_call = True
            case "broken":
                self._state = "broken"
            case "failed":
                self._state = "outside"
                self._may_begin = False
                self._emit_content("".join(self._held))
        return scanner.outcome != "open"

    def _broken(self) -> bool:
        text, end = self._pending, self._syntax.end
        start = text.find(end) if end else -1
        if start < 0:
            safe = len(text) - partial_suffix(text, end)
            self._emit_arguments(text[:safe])
            self._pending = text[safe:]
            return False
        self._emit_arguments(text[:start])
        self._events.append(CallEnd())
        self._pending = text[start:]
        self._state = "after"
        self._is_after_call = True
        return True

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def _after_tagged(self) -> bool:
        text, end = self._pending, self._syntax.end
        rest = text.lstrip(_BEFORE_END)
        if rest.startswith(end):
            self._pending = rest[len(end) :]
        elif end.startswith(rest):
            return False
        self._state = "outside"
        return True

    def _after_bare(self) -> bool:
        between = _BEFORE_NEXT.match(self._pending)
        assert between is not None
        if between.end() == len(self._pending):
            return False
        if self._pending[between.end()] == "{":
            self._enter(between.end())
        else:
            self._state = "outside"
        return True
