"""Counts the tokens between the marks of the reasoning, as vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from eventlm.text.tools.formats import Formats
from eventlm.text.tools.message import MessageFormat
from eventlm.text.tools.parser_events import partial_suffix


class ReasoningTokens:
    """Counts the reasoning of one text, token by token; `token_bytes` is what each adds to the text.

    A token counts if it has a byte of the reasoning. Bytes that may begin the end mark do not count yet.
    """

    def __init__(self, begin: str, end: str, token_bytes: Callable[[int], bytes], *, is_open: bool) -> None:
        self.count = 0
        self._begin = begin.encode()
        self._end = end.encode()
        self._token_bytes = token_bytes
        self._is_open = is_open
        self._state: Literal["before", "inside", "after"] = "before"
        #: Bytes that are still ambiguous, and how many of them belong to each token.
        self._pending = b""
        self._sizes: list[int] = []
        #: Whether the first of those tokens was counted.
        self._is_counted = False

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens."""
        for token_id in token_ids:
            if self._state == "after":
                return
            data = self._token_bytes(token_id)
            if data:
                self._pending += data
                self._sizes.append(len(data))
                self._look()

    def _look(self) -> None:
        if self._state == "before":
            self._look_for_begin()
        if self._state == "inside":
            end = self._pending.find(self._end)
            if end >= 0:
                self._state = "after"
                self._take(end, is_reasoning=True)
            else:
                self._take(len(self._pending) - partial_suffix(self._pending, self._end), is_reasoning=True)

    def _look_for_begin(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._begin):
            self._state = "inside"
            self._take(len(self._pending) - len(text) + len(self._begin), is_reasoning=False)
        elif not self._begin.startswith(text):
            self._state = "inside" if self._is_open else "after"

    def _take(self, num_bytes: int, *, is_reasoning: bool) -> None:
        """Classify the first of the pending bytes."""
        self._pending = self._pending[num_bytes:]
        while num_bytes:
            if is_reasoning and not self._is_counted:
                self.count += 1
                self._is_counted = True
            taken = min(num_bytes, self._sizes[0])
            num_bytes -= taken
            self._sizes[0] -= taken
            if not self._sizes[0]:
                self._sizes.pop(0)
                self._is_counted = False


def reasoning_tokens(
    format: MessageFormat, formats: Formats, token_bytes: Callable[[int], bytes]
) -> ReasoningTokens | None:
    """A counter for a text of this format; None if it has no reasoning."""
    found = formats.reasoning
    if found is None or format.reasoning == "closed":
        return None
    return ReasoningTokens(found.begin, found.end, token_bytes, is_open=format.reasoning == "open")
