"""Words for phases, causes and times."""

from __future__ import annotations

from typing import get_args

import pytest

from eventlm.core.state.step_plan import WaitCause
from eventlm.replay.explain.result import Doing
from eventlm.replay.explain.words import CAUSES, label, listed, milliseconds


def test_every_cause_has_words_of_its_own() -> None:
    assert CAUSES.keys() == {*get_args(WaitCause), *get_args(Doing)}
    assert len(set(CAUSES.values())) == len(CAUSES)


@pytest.mark.parametrize(
    ("ns", "text"), [(1_942_312_345, "1,942.3 ms"), (2_130_000, "2.13 ms"), (42_000, "0.042 ms"), (0, "0.000 ms")]
)
def test_times_have_three_digits_or_a_tenth(ns: int, text: str) -> None:
    assert milliseconds(ns) == text


def test_parts_and_lists_in_words() -> None:
    assert label("retry", "backend_limit") == "retry: backends full"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
