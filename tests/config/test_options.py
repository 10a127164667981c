"""What a message says of a word that nobody knows."""

from __future__ import annotations

import difflib
import re
from typing import NoReturn

import pytest

from eventlm.config.options import did_you_mean, options
from eventlm.worker.fake.tokens import FakeParameters

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


def test_a_word_that_is_far_too_long_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a client's megabytes must not be compared")

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    assert did_you_mean("a" * (3 * max(map(len, POLICIES)) + 1), POLICIES) == ""


@pytest.mark.parametrize("word", ["--n-gpu-layers", "--seed", "--ssl-keyfile", "-m"])
def test_what_is_only_a_little_like_a_flag_is_no_slip_of_it(word: str) -> None:
    assert did_you_mean(word, [*(option.flag for option in options().values()), "-h", "--no-prefix-cache"]) == ""


def test_the_help_lists_all_parameters_of_the_fake_model() -> None:
    named = re.findall(r"\b(?:[a-z_]+_(?:ns|ppm|factor)|recurrent(?==))\b", options()["fake"].description)
    assert sorted(named) == sorted(FakeParameters.__struct_fields__)
