"""From tokens to text, one sequence at a time.

A character may span several tokens, so their bytes go through an incremental UTF-8 decoder. Bytes that can never become
a character turn into U+FFFD, as in `bytes.decode(errors="replace")`, and so does an incomplete character at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Literal

from eventlm.text.stop_strings import StopMatcher, StopStrings


class Detokenizer:
    """Incremental detokenizing: the joined results do not depend on how tokens are grouped into calls."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        #: The start of a character.
        self._begun = b""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        data = self._begun + b"".join(map(self._token_bytes, token_ids))
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[num_decoded:]
        return text

    def flush(self) -> str:
        """U+FFFD if the last character is incomplete, else nothing."""
        data, self._begun = self._begun, b""
        return codecs.utf_8_decode(data, "replace", True)[0]


class SequenceText:
    """The text of one sequence, as its client sees it, whether streamed or not.

    Tokens of `end_token_ids` (end of sequence, stop tokens) count but have no text. With stop strings, the text ends
    before the first one that is complete after `min_tokens` tokens, or with `include_stop` after it; `stop_position` is
    then the number of tokens up to and including the one that completed it. `is_over` is called with the visible text
    of each token; the text ends in the same way after the token for which it returns True.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        end_token_ids: frozenset[int] = frozenset(),
        is_over: Callable[[str], bool] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops is not None else None
        self._min_tokens = min_tokens
        self._end_token_ids = end_token_ids
        self._is_over = is_over
        self.is_closed = False
        #: Tokens that belong to the output.
        self.num_tokens = 0
        self.stop_position: int | None = None

    @property
    def end_reason(self) -> Literal["stop", "tool_calls"]:
        """The reason of an end at `stop_position`."""
        return "stop" if self.stop_string is not None else "tool_calls"

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.found if self._matcher is not None else None

    def push(self, token_ids: list[int]) -> str:
        """The text that is safe to send after these tokens. Tokens after an end are ignored."""
        if self.is_closed:
            return ""
        if self._matcher is None and self._is_over is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(self._visible(token_ids))
        pieces = []
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._detokenizer.push(self._visible([token_id]))
            if self._matcher is not None:
                text = self._matcher.push(text, may_stop=self._may_stop)
            pieces.append(text)
            if self._matcher is not None and self._matcher.found:
                self._stop()
                break
            if self._is_over is not None and self._is_over(text) and self._may_stop:
                self._stop()
                break
        return "".join(pieces)

    def close(self) -> str:
        """The text that was held back, when no more tokens come. A second call returns nothing."""
        if self.is_closed:
            return ""
        tail = self._detokenizer.flush()
        if self._matcher is None:
            self.is_closed = True
            return tail
        text = self._matcher.push(tail, may_stop=self._may_stop)
        if self._matcher.found:
            self._stop()
            return text
        self.is_closed = True
        return text + self._matcher.release()

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _visible(self, token_ids: list[int]) -> Iterable[int]:
        if self._end_token_ids.isdisjoint(token_ids):
            return token_ids
        return (token_id for token_id in token_ids if token_id not in self._end_token_ids)

    def _stop(self) -> None:
        self.stop_position = self.num_tokens
        self.is_closed = True
