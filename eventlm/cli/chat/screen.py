"""What a chat shows: answers as they come, notes beside them. Plain text where nobody watches."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext

from eventlm.cli.chat.input import no_echo
from eventlm.formatting import counted

_DIM, _RED, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
#: A model's text must not steer the terminal: control characters but newline and tab become U+FFFD.
_CONTROLS = {code: "�" for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}


class Screen:
    """Standard output and error. On a terminal notes are shown, dimly; else only what was asked for is printed."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._styled = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._at_line_start = True

    def busy(self) -> AbstractContextManager[None]:
        """Within `with` nobody is asked for a line: what is typed is not shown, and goes to the next prompt."""
        return no_echo() if self.interactive else nullcontext()

    def text(self, text: str) -> None:
        """A piece of an answer."""
        if text:
            self._write(text.translate(_CONTROLS) if self.interactive else text)

    def thought(self, text: str) -> None:
        """A piece of what a model thinks before it answers."""
        if text and self.interactive:
            self._write(self._style(_DIM, text.translate(_CONTROLS)))

    def line(self, text: str = "") -> None:
        """A line that was asked for."""
        self.end_line()
        self.text(text + "\n")

    def note(self, text: str) -> None:
        """A line for a person who watches."""
        if self.interactive:
            self.end_line()
            self._write(self._style(_DIM, text.translate(_CONTROLS)) + "\n")

    def error(self, text: str) -> None:
        """A line about what went wrong."""
        self.end_line()
        line = "eventlm: error: " + " ".join(text.splitlines())
        print(self._style(_RED, line.translate(_CONTROLS)) if self._styled else line, file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """Begin a new line unless at the start of one."""
        if not self._at_line_start:
            self._write("\n")

    def _style(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self._styled else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._at_line_start = text.removesuffix(_RESET).endswith("\n")


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
