from __future__ import annotations

import pytest

from eventlm.engine.request_check import TOKEN_ID_LIMIT
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer

TOKENIZER = PieceTokenizer()


@pytest.mark.parametrize("text", ["", "a", "abcd", "größer 🙂 日本語", "\x00\x7f" * 9, "\U0010ffff" * 3])
def test_ids_are_those_of_four_bytes_each(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    assert len(ids) == -(-len(text.encode()) // 4)
    assert all(0 <= token_id < TOKENIZER.vocab_size < TOKEN_ID_LIMIT for token_id in ids)


def test_equal_beginnings_have_equal_ids() -> None:
    short = TOKENIZER.encode("the same beginning", add_special_tokens=False)
    long = TOKENIZER.encode("the same beginning, and more", add_special_tokens=False)
    assert long[: len(short) - 1] == short[:-1]
    assert long[len(short) - 1] != short[-1]
    assert TOKENIZER.encode("The same", add_special_tokens=False)[0] != short[0]


def test_a_lone_surrogate_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        TOKENIZER.encode("\ud800", add_special_tokens=False)


def test_there_is_no_way_back() -> None:
    assert TOKENIZER.decode([1, 2]) == ""
