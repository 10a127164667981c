"""Wrapped text: no word is cut that fits a line, whatever the pieces, and nothing is lost."""

from __future__ import annotations

import random
import re

import pytest
from prompt_toolkit.utils import get_cwidth

from eventlm.cli.chat.screen import WordWrap

TEXT = (
    "Every decision of the scheduler is an event,\nand a run can be rewound.\n\n"
    "    indented = code(with, arguments)\n\ttab\n\n"
    "東京は日本の首都です。Naïve café words, ends.  Two spaces  and a https://example.org/quite/a/long/address here."
)


def wrapped(text: str, columns: int, pieces: int = 1) -> str:
    wrap = WordWrap(lambda: columns)
    return "".join(wrap.feed(text[at : at + pieces]) for at in range(0, len(text), pieces)) + wrap.flush()


def test_lines_break_between_words() -> None:
    assert wrapped("one two three four", 9) == "one two\nthree\nfour"
    assert wrapped("one two three four", 7) == "one two\nthree\nfour"
    assert wrapped("one\ntwo three", 9) == "one\ntwo three"
    assert wrapped("  if x:\n    return", 40) == "  if x:\n    return"
    assert wrapped("東京都日本", 4) == "東京\n都日\n本"
    assert wrapped("a\tbc", 9) == "a\nbc"
    assert wrapped("a\tb", 9) == "a\tb"


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert wrapped("see abcdefghijklm ok no", 5) == "see\nabcdefghijklm\nok no"


@pytest.mark.parametrize("columns", [2, 10, 24, 60, 200])
def test_pieces_make_no_difference_and_no_word_that_fits_is_cut(columns: int) -> None:
    whole = wrapped(TEXT, columns, len(TEXT))
    assert {wrapped(TEXT, columns, pieces) for pieces in (1, 2, 3, 7)} == {whole}
    assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", TEXT)
    words = {word for word in re.split(r"\s", TEXT) if len(word) <= columns and word.isascii()}
    assert words <= set(re.split(r"\s", whole))
    for line in whole.expandtabs(8).split("\n"):
        assert get_cwidth(line.rstrip()) <= columns or any(len(word) > columns for word in line.split())


def test_a_word_is_shown_as_soon_as_the_next_character_is_there() -> None:
    wrap = WordWrap(lambda: 20)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", ", wor", "ld", ".\n", "x")] == [
        "",
        "",
        "Hello,",
        "",
        " world.\n",
        "",
    ]
    assert wrap.flush() == "x"
    assert wrap.feed(" y z") == " y"


def test_random_text_in_random_pieces() -> None:
    rng = random.Random(4)
    for _ in range(200):
        text = "".join(rng.choices("ab  \n\t日é", k=60))
        columns = rng.randrange(2, 30)
        wrap, shown, at = WordWrap(lambda columns=columns: columns), "", 0  # type: ignore[misc]
        while at < len(text):
            size = rng.randrange(1, 9)
            shown += wrap.feed(text[at : at + size])
            at += size
        assert shown + wrap.flush() == wrapped(text, columns)
