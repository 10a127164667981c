from __future__ import annotations

import pytest

from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.tokens import MAX_LENGTH, MAX_NUMBER, tokenize


def _value(text: str) -> int:
    return tokenize(text)[0].value


def test_numbers_are_exact_integers() -> None:
    assert _value("1_000") == 1000
    assert [_value(f"3{unit}") for unit in ("ns", "us", "ms", "s", "min")] == [
        3,
        3_000,
        3_000_000,
        3_000_000_000,
        180_000_000_000,
    ]
    assert _value("1.5s") == 1_500_000_000
    assert _value("0.001us") == 1
    assert _value("12.5%") == 125_000
    assert (_value("8k"), _value("2M")) == (8000, 2_000_000)
    assert _value(str(MAX_NUMBER)) == MAX_NUMBER


def test_tokens_know_their_columns() -> None:
    found = tokenize('  free<=5 and event=="a b"')
    assert [(token.kind, token.text, token.column) for token in found] == [
        ("word", "free", 3),
        ("sign", "<=", 7),
        ("number", "5", 9),
        ("word", "and", 11),
        ("word", "event", 15),
        ("sign", "==", 20),
        ("text", "a b", 22),
        ("end", "", 27),
    ]


def test_a_text_may_contain_quotes() -> None:
    assert tokenize(r'"say \"no\" \\ it' "'" 's"')[0].text == 'say "no" \\ it\'s'
    assert tokenize("'say \"no\"'")[0].text == 'say "no"'


@pytest.mark.parametrize(
    ("source", "column", "word"),
    [
        ("free < 1.5", 8, "integer"),
        ("free < 0.1ns", 8, "integer"),
        ("free < 5sec", 9, "ns, us"),
        (f"free < {MAX_NUMBER + 1}", 8, "too large"),
        ("free < 10s and 9_999_999_999_999s < 1", 16, "too large"),
        ("event == 'a", 10, "closing '"),
        ("free < 5 & free > 3", 10, "write and"),
        ("a || b", 3, "write or"),
        ("! a", 1, "write not"),
        ("a $ b", 3, "no meaning"),
        ("a" * (MAX_LENGTH + 1), MAX_LENGTH + 1, "characters"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(source: str, column: int, word: str) -> None:
    with pytest.raises(ExpressionError) as found:
        tokenize(source)
    assert found.value.column == column
    assert word in found.value.problem
