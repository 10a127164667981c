"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 event`, `1,234 events`: for nouns whose plural takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
