"""Numbers as people read them."""

from __future__ import annotations

import signal
from collections.abc import Mapping


def counted(number: int, noun: str) -> str:
    """`1 event`, `1,234 events`: for nouns whose plural takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def tally(counts: Mapping[str, int]) -> str:
    """`1,234 length, 5 stop`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def sentence(text: str) -> str:
    """`no such thing` as `No such thing.`"""
    return f"{text[:1].upper()}{text[1:]}."


def printable(text: str) -> str:
    """A text without what steers a terminal: control characters are written as Python escapes them."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def death_in_words(exit_code: int) -> str:
    """How a process died, by its exit code; negative: by that signal."""
    if exit_code >= 0:
        return f"died (exit code {exit_code})"
    try:
        return f"died (killed by {signal.Signals(-exit_code).name})"
    except ValueError:  # a real-time signal: only the first and the last of them have names
        return f"died (killed by signal {-exit_code})"
