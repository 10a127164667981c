"""Reasoning between `<think>` and `</think>`, at the start of the text."""

from __future__ import annotations

from typing import Literal

from eventlm.text.tools.formats import ReasoningFormat, ReasoningState
from eventlm.text.tools.pieces import Content, Piece, Reasoning, TextMachine, partial_suffix

_WHITESPACE = " \t\r\n"


class ThinkParser(TextMachine):
    """Splits reasoning off. Line breaks beside the tags are not part of it, nor of the content.

    `is_open`: the text begins within the reasoning; a tag that opens it once more says nothing.
    """

    def __init__(self, begin: str, end: str, *, is_open: bool) -> None:
        self._begin = begin
        self._end = end
        self._is_open = is_open
        self._state: Literal["start", "before", "inside", "behind", "content"] = "start"
        self._pending = ""

    def push(self, text: str) -> list[Piece]:
        if self._state == "content":
            return [Content(text)] if text else []
        self._pending += text
        if self._state == "start":
            self._start()
        if self._state == "before":
            self._pending = self._pending.lstrip("\n")
            self._state = "inside" if self._pending else "before"
        pieces = self._inside() if self._state == "inside" else []
        if self._state == "behind":
            self._pending = self._pending.lstrip("\n")
            self._state = "content" if self._pending else "behind"
        if self._state == "content":
            pieces += [Content(self._pending)] if self._pending else []
            self._pending = ""
        return pieces

    def close(self) -> list[Piece]:
        rest, self._pending = self._pending, ""
        if not rest:
            return []
        is_reasoning = self._state == "inside" or (self._state == "start" and self._is_open)
        return [Reasoning(rest) if is_reasoning else Content(rest)]

    def _start(self) -> None:
        text = self._pending.lstrip(_WHITESPACE)
        if text.startswith(self._begin):
            self._pending = text[len(self._begin) :]
            self._state = "before"
        elif not self._begin.startswith(text):
            self._state = "before" if self._is_open else "content"

    def _inside(self) -> list[Piece]:
        text = self._pending
        place = text.find(self._end)
        if place >= 0:
            self._pending = text[place + len(self._end) :]
            self._state = "behind"
            said = text[:place].rstrip("\n")
        else:
            said = text[: len(text) - partial_suffix(text, self._end)].rstrip("\n")
            self._pending = text[len(said) :]
        return [Reasoning(said)] if said else []


class Qwen3(ReasoningFormat):
    """Models that decide themselves whether to think, unless the prompt did: Qwen3 and its kin."""

    begin = "<think>"
    end = "</think>"

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.end in template

    def parser(self, *, is_open: bool) -> TextMachine:
        return ThinkParser(self.begin, self.end, is_open=is_open)


class DeepSeekR1(Qwen3):
    """Models that always think, and may leave out the tag that opens it: DeepSeek-R1 and its distillations."""

    def state(self, prompt_end: str) -> ReasoningState:
        found = super().state(prompt_end)
        return "open" if found == "possible" else found
