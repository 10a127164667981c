"""Reasoning between two tags, such as `<think>` and `</think>`, at the start of the text."""

from __future__ import annotations

from typing import Literal

from eventlm.text.tools.parser_events import Content, ParserEvent, Reasoning, StreamParser, partial_suffix


class ReasoningParser(StreamParser):
    """Separates reasoning from content. Line breaks beside the tags belong to neither.

    `is_open`: the text begins within the reasoning; an opening tag at its start is skipped.
    """

    def __init__(self, begin: str, end: str, *, is_open: bool) -> None:
        self._begin = begin
        self._end = end
        self._is_open = is_open
        self._state: Literal["start", "before", "inside", "after", "content"] = "start"
        self._pending = ""

    def push(self, text: str) -> list[ParserEvent]:
        if self._state == "content":
            return [Content(text)] if text else []
        self._pending += text
        if self._state == "start":
            self._start()
        if self._state == "before" and self._skip_line_breaks():
            self._state = "inside"
        events = self._inside() if self._state == "inside" else []
        if self._state == "after" and self._skip_line_breaks():
            self._state = "content"
        if self._state == "content" and self._pending:
            events.append(Content(self._pending))
            self._pending = ""
        return events

    def close(self) -> list[ParserEvent]:
        rest, self._pending = self._pending, ""
        if not rest:
            return []
        is_reasoning = self._state == "inside" or (self._state == "start" and self._is_open)
        return [Reasoning(rest) if is_reasoning else Content(rest)]

    def _start(self) -> None:
        text = self._pending.lstrip(" \t\r\n")
        if text.startswith(self._begin):
            self._pending = text[len(self._begin) :]
            self._state = "before"
        elif not self._begin.startswith(text):
            self._state = "before" if self._is_open else "content"

    def _skip_line_breaks(self) -> bool:
        """Whether any text follows them."""
        self._pending = self._pending.lstrip("\n")
        return bool(self._pending)

    def _inside(self) -> list[ParserEvent]:
        text, _, rest = self._pending.partition(self._end)
        if len(text) < len(self._pending):
            self._state = "after"
            self._pending = rest
            text = text.rstrip("\n")
        else:
            text = text[: len(text) - partial_suffix(text, self._end)].rstrip("\n")
            self._pending = self._pending[len(text) :]
        return [Reasoning(text)] if text else []
