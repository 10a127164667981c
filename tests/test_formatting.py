"""Numbers as people read them."""

from __future__ import annotations

import pytest

from eventlm.formatting import counted, death_in_words, printable


@pytest.mark.parametrize(("number", "text"), [(0, "0 events"), (1, "1 event"), (2, "2 events"), (1234, "1,234 events")])
def test_counts_have_their_plural_and_separators(number: int, text: str) -> None:
    assert counted(number, "event") == text


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (0, "died (exit code 0)"),
        (3, "died (exit code 3)"),
        (-9, "died (killed by SIGKILL)"),
        (-40, "died (killed by signal 40)"),
    ],
)
def test_a_death_names_its_signal(exit_code: int, text: str) -> None:
    assert death_in_words(exit_code) == text


def test_no_text_steers_a_terminal() -> None:
    assert printable("ä 👍 x") == "ä 👍 x"
    assert printable("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
