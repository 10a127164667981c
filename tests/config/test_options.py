"""What a message says of a word that nobody knows."""

from __future__ import annotations

import pytest

from eventlm.config.options import did_you_mean

POLICIES = ["fcfs", "edf"]


@pytest.mark.parametrize(
    ("word", "listed_as", "hint"),
    [
        ("efd", "", "; did you mean edf?"),
        ("nonsense", "", ""),
        ("efd", "installed", "; did you mean edf? Installed: fcfs, edf"),
        ("nonsense", "installed", "; installed: fcfs, edf"),
    ],
)
def test_a_word_is_answered_by_the_nearest_known_one(word: str, listed_as: str, hint: str) -> None:
    assert did_you_mean(word, POLICIES, listed_as=listed_as) == hint
    assert did_you_mean(word, iter(POLICIES), listed_as=listed_as) == hint
