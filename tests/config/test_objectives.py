"""Objectives are read from text, and kept or missed."""

from __future__ import annotations

import pytest

from eventlm.config.objectives import Objectives, parse_objectives
from eventlm.errors import UsageError


def test_parse_objectives() -> None:
    assert parse_objectives("ttft=500,tpot=50.5") == Objectives(ttft=500.0, tpot=50.5)
    assert parse_objectives("e2e=2000") == Objectives(e2e=2000.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [("ttft", "--slo ttft"), ("itl=3", "none of ttft, tpot, e2e"), ("ttft=0", "above 0"), ("ttft=fast", "above 0")],
)
def test_impossible_objectives(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_objectives(text)


@pytest.mark.parametrize(
    ("objectives", "is_met"),
    [
        (Objectives(), True),
        (Objectives(ttft=1), True),
        (Objectives(ttft=0.9), False),
        (Objectives(tpot=0.5), True),
        (Objectives(tpot=0.4), False),
        (Objectives(e2e=2), True),
        (Objectives(e2e=1.9), False),
    ],
)
def test_limits(objectives: Objectives, *, is_met: bool) -> None:
    assert objectives.are_met_by(ttft_ns=1_000_000, tpot_ns=500_000, e2e_ns=2_000_000) is is_met


def test_one_token_keeps_any_tpot_and_none_no_ttft() -> None:
    assert Objectives(tpot=1).are_met_by(ttft_ns=5, tpot_ns=None, e2e_ns=5)
    assert not Objectives(ttft=1).are_met_by(ttft_ns=None, tpot_ns=None, e2e_ns=5)
