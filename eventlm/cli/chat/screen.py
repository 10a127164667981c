"""What a chat shows: answers as they come, and notes between them. Plain text unless it is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from prompt_toolkit.utils import get_cwidth

from eventlm.cli.chat.input import no_echo

_DIM, _RED, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
#: A model's text must not steer the terminal: control characters but newline and tab become U+FFFD.
_CONTROLS = {code: "�" for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}
_TAB_COLUMNS = 8


class Screen:
    """Standard output and error. A terminal also shows notes, dimmed, and wraps text at words."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._styled = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._at_line_start = True
        self._wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
        #: Of the word that is held back.
        self._wrap_style = ""

    def busy(self) -> AbstractContextManager[None]:
        """A context without a prompt: what is typed in it is not shown, and goes to the next prompt."""
        return no_echo() if self.interactive else nullcontext()

    def text(self, text: str) -> None:
        """A piece of an answer."""
        if self.interactive:
            self._write_wrapped("", text)
        else:
            self._write(text)

    def thought(self, text: str) -> None:
        """A piece of a model's reasoning."""
        if self.interactive:
            self._write_wrapped(_DIM, text)

    def line(self, text: str = "") -> None:
        """A line of output."""
        self.end_line()
        self.text(text + "\n")

    def note(self, text: str) -> None:
        """A line that only a terminal shows."""
        if self.interactive:
            self.end_line()
            self._write(self._wrap.feed(text.translate(_CONTROLS)) + self._wrap.flush(), _DIM)
            self.end_line()

    def error(self, text: str) -> None:
        """A line with an error."""
        self.end_line()
        line = "eventlm: error: " + " ".join(text.splitlines())
        if self._styled:
            line = f"{_RED}{line.translate(_CONTROLS)}{_RESET}"
        print(line, file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """Begin a new line unless at the start of one."""
        self._write(self._wrap.flush(), self._wrap_style)
        if not self._at_line_start:
            self._write(self._wrap.feed("\n") if self.interactive else "\n")

    def _write_wrapped(self, style: str, text: str) -> None:
        if text and style != self._wrap_style:
            self._write(self._wrap.flush(), self._wrap_style)
            self._wrap_style = style
        self._write(self._wrap.feed(text.translate(_CONTROLS)), style)

    def _write(self, text: str, style: str = "") -> None:
        if text:
            sys.stdout.write(f"{style}{text}{_RESET}" if style and self._styled else text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")


class WordWrap:
    """Wraps a stream of text at words, for a terminal that would cut them at its edge.

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
