"""One tool call as models write it, `{"name": ..., "arguments": {...}}`, scanned while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Literal

from eventlm.text.tools.pieces import CallArguments, CallBegins, CallEnds, Piece

WHITESPACE = " \t\r\n"
#: Both spellings are common, whatever a model was told.
_ARGUMENTS_KEYS = ("arguments", "parameters")
_NOT_WHITESPACE = re.compile(rf"[^{WHITESPACE}]")
_IN_STRING = re.compile(r'["\\]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_BEHIND_SCALAR = re.compile(rf"[{WHITESPACE},}}\]]")
_CLOSING = {"{": "}", "[": "]"}

Outcome = Literal["open", "ended", "failed", "broken"]


class ValueScanner:
    """Finds the end of one JSON value: strings and brackets are followed, numbers and words are taken as they are."""

    def __init__(self) -> None:
        self.is_complete = False
        #: A bracket closes another than the one that is open.
        self.is_broken = False
        self._started = False
        self._in_string = False
        self._escaped = False
        self._closing: list[str] = []

    def push(self, text: str, place: int) -> int:
        """Where in `text` the value ends, or what cannot belong to it begins; `place` is where to go on."""
        while place < len(text) and not self.is_complete and not self.is_broken:
            place = self._string(text, place) if self._in_string else self._structure(text, place)
        return place

    def _string(self, text: str, place: int) -> int:
        if self._escaped:
            self._escaped = False
            return place + 1
        found = _IN_STRING.search(text, place)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        if not self._escaped:
            self._in_string = False
            self.is_complete = not self._closing
        return found.end()

    def _structure(self, text: str, place: int) -> int:
        is_scalar = not self._closing and (self._started or text[place] not in '"{[')
        self._started = True
        found = (_BEHIND_SCALAR if is_scalar else _IN_BRACKETS).search(text, place)
        if found is None:
            return len(text)
        if is_scalar:
            self.is_complete = True
            return found.start()
        character = found[0]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif self._closing[-1] != character:
            self.is_broken = True
            return found.start()
        else:
            self._closing.pop()
            self.is_complete = not self._closing
        return found.end()


class CallScanner:
    """One call of one of the tools `names`.

    outcome: `open` until it is decided; `ended` behind the call; `failed` where the text turns out to be no call,
    nothing having been told; `broken` where the arguments stop being JSON after some of them were told. `pieces`
    collects what was found; the caller takes it.
    """

    def __init__(self, names: Container[str]) -> None:
        self.outcome: Outcome = "open"
        self.pieces: list[Piece] = []
        self.has_begun = False
        self._names = names
        self._expected: Literal["object", "first key", "key", "colon", "value", "rest of value", "comma"] = "object"
        self._scanner = ValueScanner()
        #: The key whose value is scanned; empty while a key itself is.
        self._key = ""
        self._value: list[str] = []
        self._name = ""
        self._arguments = ""

    def push(self, text: str, place: int) -> int:
        """Scan `text` from `place` on; where the scan ended: its end, unless the outcome is decided."""
        while place < len(text) and self.outcome == "open":
            if self._expected == "rest of value":
                place = self._scan(text, place)
                continue
            found = _NOT_WHITESPACE.search(text, place)
            if found is None:
                return len(text)
            place = self._take(text, found.start())
        return place

    def _take(self, text: str, place: int) -> int:
        """Take the character at `place`, which is not white space, or fail there."""
        character = text[place]
        match self._expected, character:
            case "object", "{":
                self._expected = "first key"
            case (("first key" | "key"), '"'):
                self._key = ""
                return self._begin_value(text, place)
            case "colon", ":":
                self._expected = "value"
            case "value", _ if character not in ",}]:":
                if self._key not in _ARGUMENTS_KEYS or character in '{"n':
                    return self._begin_value(text, place)
                self._give_up()
                return place
            case "comma", ",":
                self._expected = "key"
            case (("first key" | "comma"), "}"):
                self._end()
            case _:
                self._give_up()
                return place
        return place + 1 if self.outcome in ("open", "ended") else place

    def _begin_value(self, text: str, place: int) -> int:
        self._scanner = ValueScanner()
        self._value = []
        self._expected = "rest of value"
        if self._streams and text[place] == "{":
            self._begin()
        return self._scan(text, place)

    @property
    def _streams(self) -> bool:
        """Whether what is scanned is the arguments of a known tool."""
        return bool(self._name) and self._key in _ARGUMENTS_KEYS and not self._arguments

    def _scan(self, text: str, place: int) -> int:
        end = self._scanner.push(text, place)
        if self._streams and self.has_begun:
            if end > place:
                self.pieces.append(CallArguments(text[place:end]))
        else:
            self._value.append(text[place:end])
        if self._scanner.is_broken:
            self.outcome = "broken" if self._streams and self.has_begun else self.outcome
            if self.outcome == "open":
                self._give_up()
        elif self._scanner.is_complete:
            self._complete("".join(self._value))
        return end

    def _complete(self, value: str) -> None:
        if not self._key:
            key = _string(value)
            self._key = key or "?"
            self._expected = "colon"
            return
        self._expected = "comma"
        if self._key == "name" and not self._name:
            self._name = _string(value) or ""
            if self._name not in self._names:
                self._give_up()
            elif self._arguments:
                self._begin()
                self.pieces.append(CallArguments(self._arguments))
        elif self._key in _ARGUMENTS_KEYS and not self._arguments:
            if self._streams and self.has_begun:
                self._arguments = "told"
                return
            self._arguments = _arguments(value)
            if not self._arguments:
                self._give_up()
            elif self._name:
                self._begin()
                self.pieces.append(CallArguments(self._arguments))

    def _begin(self) -> None:
        self.has_begun = True
        self.pieces.append(CallBegins(self._name))

    def _end(self) -> None:
        if not self._name:
            self._give_up()
            return
        if not self.has_begun:
            # A tool without parameters.
            self._begin()
            self.pieces.append(CallArguments("{}"))
        self.outcome = "ended"
        self.pieces.append(CallEnds())

    def _give_up(self) -> None:
        """This is no call; or, if its arguments are complete, one that is not closed properly."""
        if self.has_begun:
            self.outcome = "ended"
            self.pieces.append(CallEnds())
        else:
            self.outcome = "failed"


def _string(literal: str) -> str | None:
    """What a JSON string stands for; None for anything else."""
    try:
        value = json.loads(literal, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _arguments(value: str) -> str:
    """Arguments that came before the name, or as a string of JSON, or as null; empty if they are none of these."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    text = (_string(value) or "").strip(WHITESPACE)
    try:
        return text if isinstance(json.loads(text), dict) else ""
    except (ValueError, RecursionError):
        return ""
