"""Finds tool calls in a text: JSON objects between tags, or alone at its start."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from msgspec import Struct

from eventlm.text.tools.call_scanner import WHITESPACE, CallScanner
from eventlm.text.tools.pieces import CallArguments, CallEnds, Content, Piece, TextMachine, partial_suffix

#: Between a call and its end tag; models are known to close one bracket too many.
_BEFORE_END = WHITESPACE + "}"
_BEFORE_NEXT = re.compile(rf"[{WHITESPACE}]*(?:;[{WHITESPACE}]*)?")


class CallSyntax(Struct, frozen=True, kw_only=True):
    """How a family of models writes calls.

    begin, end: tags around each; `end` empty: a call ends with its object. arguments_key: of the object. is_bare:
    calls may do without `begin` at the start of the text and behind another call. layout: what is around an object
    where a grammar writes it; separator: between two such.
    """

    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    is_bare: bool = False
    layout: tuple[str, str]
    separator: str


class CallParser(TextMachine):
    """Text before, between and behind calls is content, and so is a call that turns out to be none.

    A call is none if it is not of one of the tools `names`, or is not well-formed up to its arguments. From there on
    it has been told, and stays a call: arguments that are not JSON are told as they are, up to the end tag. White space
    beside calls is not content.
    """

    def __init__(self, syntax: CallSyntax, names: Container[str]) -> None:
        self._syntax = syntax
        self._names = names
        self._state: Literal["outside", "call", "broken", "behind"] = "outside"
        self._pieces: list[Piece] = []
        #: What has come and is not decided.
        self._pending = ""
        #: Whether an object that comes now is a call without a tag.
        self._may_begin = syntax.is_bare
        self._is_behind_call = False
        self._scanner = CallScanner(names)
        #: The text since the end of the content, in case it is no call.
        self._held: list[str] = []

    def push(self, text: str) -> list[Piece]:
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
                case "behind":
                    step = self._behind_tagged() if self._syntax.end else self._behind_bare()
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> list[Piece]:
        rest, self._pending = self._pending, ""
        match self._state:
            case "outside":
                if rest.strip(WHITESPACE) or not self._is_behind_call:
                    self._say(rest)
            case "call":
                if not self._scanner.has_begun:
                    self._say("".join(self._held))
            case "broken":
                self._tell(rest)
            case "behind":
                # White space, a separator, or what there is of the end tag.
                pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
            self._is_behind_call = False
            self._may_begin = False

    # Each step takes what it can from the pending text; it returns whether there may be more to do.

    def _outside(self) -> bool:
        text, tag = self._pending, self._syntax.begin
        if self._may_begin:
            start = text.lstrip(WHITESPACE)
            if start.startswith("{"):
                self._enter(len(text) - len(start))
                return True
            self._may_begin = not start or tag.startswith(start)
        place = text.find(tag)
        if place >= 0:
            said = len(text[:place].rstrip(WHITESPACE))
            self._say(text[:said])
            self._pending = text[said:]
            self._enter(place - said + len(tag))
            return True
        safe = len(text[: len(text) - partial_suffix(text, tag)].rstrip(WHITESPACE))
        self._say(text[:safe])
        self._pending = text[safe:]
        return False

    def _enter(self, num_held: int) -> None:
        """A call begins behind so many characters, which are no content if it is one."""
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
        self._pieces += scanner.pieces
        scanner.pieces = []
        match scanner.outcome:
            case "ended":
                self._state = "behind"
                self._is_behind_call = True
            case "broken":
                self._state = "broken"
            case "failed":
                self._state = "outside"
                self._may_begin = False
                self._say("".join(self._held))
        return scanner.outcome != "open"

    def _broken(self) -> bool:
        text, end = self._pending, self._syntax.end
        place = text.find(end) if end else -1
        if place < 0:
            safe = len(text) - partial_suffix(text, end)
            self._tell(text[:safe])
            self._pending = text[safe:]
            return False
        self._tell(text[:place])
        self._pieces.append(CallEnds())
        self._pending = text[place:]
        self._state = "behind"
        self._is_behind_call = True
        return True

    def _tell(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(text))

    def _behind_tagged(self) -> bool:
        text, end = self._pending, self._syntax.end
        rest = text.lstrip(_BEFORE_END)
        if rest.startswith(end):
            self._pending = rest[len(end) :]
        elif end.startswith(rest):
            return False
        self._state = "outside"
        return True

    def _behind_bare(self) -> bool:
        between = _BEFORE_NEXT.match(self._pending)
        assert between is not None
        if between.end() == len(self._pending):
            return False
        if self._pending[between.end()] == "{":
            self._enter(between.end())
        else:
            self._state = "outside"
        return True
