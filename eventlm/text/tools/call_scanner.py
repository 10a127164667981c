"""One tool call as models write it, `{"name": ..., "arguments": {...}}`, scanned while it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Generator
from typing import Literal

from eventlm.text.tools.parser_events import CallArguments, CallEnd, CallStart, ParserEvent

WHITESPACE = " \t\r\n"
#: Both spellings are common, whichever the prompt shows.
_ARGUMENTS_KEYS = ("arguments", "parameters")
_NOT_WHITESPACE = re.compile(rf"[^{WHITESPACE}]")
_IN_STRING = re.compile(r'["\\]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(rf"[{WHITESPACE},}}\]]")
_CLOSING = {"{": "}", "[": "]"}

Outcome = Literal["open", "ended", "failed", "broken"]


class ValueScanner:
    """Finds the end of one JSON value. It follows strings and brackets, and does not look into numbers and words."""

    def __init__(self) -> None:
        self.is_complete = False
        #: A closing bracket does not match the open one.
        self.is_broken = False
        self._started = False
        self._in_string = False
        self._escaped = False
        self._closing: list[str] = []

    def push(self, text: str, start: int) -> int:
        """Scan `text` from `start`. Returns where the value ends, or where it breaks."""
        while start < len(text) and not self.is_complete and not self.is_broken:
            start = self._string(text, start) if self._in_string else self._structure(text, start)
        return start

    def _string(self, text: str, start: int) -> int:
        if self._escaped:
            self._escaped = False
            return start + 1
        found = _IN_STRING.search(text, start)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        if not self._escaped:
            self._in_string = False
            self.is_complete = not self._closing
        return found.end()

    def _structure(self, text: str, start: int) -> int:
        is_scalar = not self._closing and (self._started or text[start] not in '"{[')
        self._started = True
        found = (_AFTER_SCALAR if is_scalar else _IN_BRACKETS).search(text, start)
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

    outcome: `open` until it is decided; `ended` after the call; `failed` if the text turns out to be no call, before
    any event; `broken` if the arguments stop being JSON after some of them were in events. The caller takes `events`.
    """

    def __init__(self, names: Container[str]) -> None:
        self.outcome: Outcome = "open"
        self.events: list[ParserEvent] = []
        self.has_begun = False
        self._names = names
        self._name = ""
        #: The text of the arguments, or any text once they were in events.
        self._arguments = ""
        self._text = ""
        #: Where in the text to go on.
        self._position = 0
        self._scan = self._call()

    def push(self, text: str, start: int) -> int:
        """Scan `text` from `start`. Returns where the scan stopped: at the end, unless the outcome is decided."""
        self._text, self._position = text, start
        if start < len(text):
            next(self._scan, None)
        return self._position

    # These scan what their names say, and yield when they need more text.

    def _call(self) -> Generator[None]:
        if (yield from self._next()) != "{":
            return self._finish()
        self._position += 1
        character = yield from self._next()
        while character != "}":
            if character != '"':
                return self._finish()
            key = _string((yield from self._value())) or "?"
            if (yield from self._next()) != ":":
                return self._finish()
            self._position += 1
            yield from self._member(key)
            if self.outcome != "open":
                return None
            character = yield from self._next()
            if character == ",":
                self._position += 1
                character = yield from self._next()
                if character == "}":
                    return self._finish()
            elif character != "}":
                return self._finish()
        if not self._name:
            return self._finish()
        self._position += 1
        if not self.has_begun:
            # A tool without parameters.
            self._begin("{}")
        return self._finish()

    def _member(self, key: str) -> Generator[None]:
        character = yield from self._next()
        is_arguments = key in _ARGUMENTS_KEYS and not self._arguments
        if character in ",}]:" or (key in _ARGUMENTS_KEYS and character not in '{"n'):
            return self._finish()
        if is_arguments and self._name and character == "{":
            self._begin()
            self._arguments = "streamed"
            yield from self._value(streams=True)
            return None
        value = yield from self._value()
        if self.outcome != "open":
            return None
        if key == "name" and not self._name:
            self._name = _string(value) or ""
            if self._name not in self._names:
                return self._finish()
            if self._arguments:
                self._begin(self._arguments)
        elif is_arguments:
            self._arguments = _arguments(value)
            if not self._arguments:
                return self._finish()
            if self._name:
                self._begin(self._arguments)
        return None

    def _value(self, *, streams: bool = False) -> Generator[None, None, str]:
        """Returns the text of the value, or with `streams` puts it into events as it comes."""
        scanner, parts = ValueScanner(), []
        while True:
            start = self._position
            self._position = scanner.push(self._text, start)
            part = self._text[start : self._position]
            if not streams:
                parts.append(part)
            elif part:
                self.events.append(CallArguments(part))
            if scanner.is_complete:
                return "".join(parts)
            if scanner.is_broken:
                if streams:
                    self.outcome = "broken"
                else:
                    self._finish()
                return ""
            yield

    def _next(self) -> Generator[None, None, str]:
        """Returns the next character that is not whitespace, and stays before it."""
        while (found := _NOT_WHITESPACE.search(self._text, self._position)) is None:
            self._position = len(self._text)
            yield
        self._position = found.start()
        return found[0]

    def _begin(self, arguments: str = "") -> None:
        self.has_begun = True
        self.events.append(CallStart(self._name))
        if arguments:
            self.events.append(CallArguments(arguments))

    def _finish(self) -> None:
        """Stop scanning. What has begun is a call, even if it is not closed properly."""
        if self.has_begun:
            self.outcome = "ended"
            self.events.append(CallEnd())
        else:
            self.outcome = "failed"


def _string(literal: str) -> str | None:
    """The value of a JSON string; None for anything else."""
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
