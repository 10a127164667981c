"""Stop strings in a growing text.

All stop strings are matched at once, character by character, with the Knuth-Morris-Pratt automaton of each. The stop
string that is complete first wins, the longest of several. So the result depends on the text alone, not on how it was
cut into tokens or outputs. Stop strings that are complete too early (`min_tokens`) do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class _Pattern(NamedTuple):
    text: str
    #: failure[i]: length of the longest proper prefix of `text` that is a suffix of text[:i + 1].
    failure: list[int]


def _failure_table(text: str) -> list[int]:
    failure = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = failure[length - 1]
        if text[end] == text[length]:
            length += 1
        failure[end] = length
    return failure


class StopStrings:
    """The stop strings of a request, compiled once for all its sequences. None of them is empty."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.patterns = [_Pattern(stop, _failure_table(stop)) for stop in stops]
        starts = "".join(re.escape(pattern.text[0]) for pattern in self.patterns)
        self.first_character = re.compile(f"[{starts}]")


class StopMatcher:
    """Finds stop strings in one sequence's text and holds back text that may become one.

    With `include_stop` the text includes the stop string, so nothing is held back.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._matched = [0] * len(stops.patterns)
        #: The end of the text so far that may become a stop string.
        self._held = ""
        #: The stop string that was found.
        self.found: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece of text; returns the text that certainly belongs to the output.

        Without `may_stop`, a stop string that this piece completes is ordinary text. Once `found` is set, the output is
        complete and nothing more may be pushed.
        """
        if not self._held and not self._stops.first_character.search(text):
            return text
        pending = self._held + text
        shown = len(self._held) if self._include_stop else 0
        for end, character in enumerate(text, start=len(self._held) + 1):
            if (stop := self._step(character)) and may_stop:
                self.found = stop
                self._held = ""
                return pending[shown : end if self._include_stop else end - len(stop)]
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[shown : len(pending) if self._include_stop else safe]

    def release(self) -> str:
        """The text held back, for a sequence that has ended without a stop string."""
        held, self._held = self._held, ""
        return "" if self._include_stop else held

    def _step(self, character: str) -> str:
        """Advance every automaton by one character; the longest stop string completed by it, if any."""
        completed = ""
        for which, (text, failure) in enumerate(self._stops.patterns):
            length = self._matched[which]
            while length and text[length] != character:
                length = failure[length - 1]
            if text[length] == character:
                length += 1
            if length == len(text):
                completed = max(completed, text, key=len)
                length = failure[-1]
            self._matched[which] = length
        return completed
