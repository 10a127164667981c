"""Wraps a stream of text at words, for a terminal that would cut them at its edge."""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

_TAB_COLUMNS = 8


class WordWrap:
    """Text comes in pieces and leaves with line breaks between words.

    A word is held back until the character after it: only then is it clear whether the word fits. Wide characters, as
    in Chinese, are words of their own. A word that is longer than a line is not held back, and the terminal breaks it.
    """

    def __init__(self, num_columns: Callable[[], int]) -> None:
        self._num_columns = num_columns
        #: Columns of the line that are taken.
        self._column = 0
        self._gap = ""
        self._word = ""
        #: The word at the end of the line is longer than a line.
        self._is_long = False

    def feed(self, text: str) -> str:
        """Take a piece of text; returns what can be shown now."""
        limit = max(self._num_columns(), 1)
        return "".join(self._take(character, limit) for character in text)

    def flush(self) -> str:
        """What is still held back. The text goes on in the same line."""
        return self._place(max(self._num_columns(), 1)) + self._take_gap()

    def _take(self, character: str, limit: int) -> str:
        if character == "\n":
            shown = self._place(limit) + "\n"
            self._column, self._gap = 0, ""
            return shown
        if character in " \t":
            shown = self._place(limit)
            self._gap += character
            return shown
        if get_cwidth(character) > 1:
            before = self._place(limit)
            self._word = character
            return before + self._place(limit)
        self._word += character
        if not self._is_long and get_cwidth(self._word) <= limit:
            return ""
        shown = self._place(limit)
        self._is_long = True
        return shown

    def _place(self, limit: int) -> str:
        """The word that is held back, after its gap or on a new line."""
        word, self._word = self._word, ""
        goes_on, self._is_long = self._is_long, False
        if not word:
            return ""
        columns = get_cwidth(word)
        if not goes_on and self._column + self._gap_columns() + columns > limit:
            # Neither a second line break nor a line of blanks before a word that fills its own line.
            shown = "\n" if self._column else ""
            self._column, self._gap = 0, ""
        else:
            shown = self._take_gap()
        self._column += columns
        while self._column > limit:
            self._column -= limit
        return shown + word

    def _gap_columns(self) -> int:
        column = self._column
        for character in self._gap:
            column += _TAB_COLUMNS - column % _TAB_COLUMNS if character == "\t" else 1
        return column - self._column

    def _take_gap(self) -> str:
        self._column += self._gap_columns()
        gap, self._gap = self._gap, ""
        return gap
