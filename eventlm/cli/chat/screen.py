"""What a chat shows: answers as they come, and notes between them. Plain text unless a person watches."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext

from eventlm.cli.chat.input import no_echo
from eventlm.cli.chat.word_wrap import WordWrap
from eventlm.formatting import counted

_DIM, _RED, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
#: A model's text must not steer the terminal: control characters but newline and tab become U+FFFD.
_CONTROLS = {code: "�" for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}


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
        """A piece of what a model thinks before it answers."""
        if self.interactive:
            self._write_wrapped(_DIM, text)

    def line(self, text: str = "") -> None:
        """A line that was asked for."""
        self.end_line()
        self.text(text + "\n")

    def note(self, text: str) -> None:
        """A line for a person who watches."""
        if self.interactive:
            self.end_line()
            self._write(self._wrap.feed(text.translate(_CONTROLS)) + self._wrap.flush(), _DIM)
            self.end_line()

    def error(self, text: str) -> None:
        """A line about what went wrong."""
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


def answer_summary(
    *, num_tokens: int, decode_seconds: float, first_seconds: float, context_tokens: int, max_model_len: int
) -> str:
    """How fast an answer came, and how much of the context the conversation takes (0: not known)."""
    parts = [counted(num_tokens, "token")]
    if num_tokens > 1 and decode_seconds > 0:
        parts.append(f"{(num_tokens - 1) / decode_seconds:.1f} tokens/s")
    parts.append(f"first after {first_seconds:.2f} s")
    if context_tokens:
        limit = f" of {max_model_len:,}" if max_model_len else ""
        parts.append(f"context {context_tokens:,}{limit}")
    return ", ".join(parts)
