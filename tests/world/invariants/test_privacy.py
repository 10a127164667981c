"""Texts that appear where they must not are found."""

from __future__ import annotations

import pytest

from tests.world.invariants.checks import BrokenInvariant, Checks
from tests.world.invariants.privacy import Privacy


def _check(content: str) -> None:
    Privacy([], Checks()).check("the log", content.encode())


def test_lines_of_a_log_are_no_texts() -> None:
    _check('{"t":"launch","decodes":[[5,0]],"blocks":[112,113,114]}\n{"event": "tokens, blocks; schedule"}')
    _check('{"t":"snapshot","rows":[3,112,112,112,2]}')


@pytest.mark.parametrize(
    "content",
    [
        "a log of 日本, steps",
        r'{"text":"gr\u00f6\u00dfer"}',
        "hello pppp",
        f"{[*b'hello pppp']}",
        f"{[*'naïve:'.encode()]}".replace(" ", ""),
    ],
    ids=["output", "output as JSON", "prompt", "tokens of a prompt", "tokens of an output"],
)
def test_texts_are_found_in_each_form(content: str) -> None:
    with pytest.raises(BrokenInvariant, match="no text is in the log"):
        _check(content)
