"""Grammars in tests: whether a text matches one, and random schemas and regular expressions of bounded texts."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from eventlm.grammars import build_matcher, make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_BYTES = 256


@cache
def byte_tokenizer() -> LLTokenizer:
    """A vocabulary of all bytes."""
    return make_tokenizer([bytes([byte]) for byte in range(NUM_BYTES)], {})


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text matches."""
    matcher = build_matcher(byte_tokenizer(), grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
