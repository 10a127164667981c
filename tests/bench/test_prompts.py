"""Synthetic prompts have the length that was asked for."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.bench.draws import random_stream
from eventlm.bench.prompts import (
    WORDS,
    SharedPrefixes,
    TokenizerPrompts,
    WordPrompts,
    fit_word_prompts,
    word_text,
)
from eventlm.errors import UsageError
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import Tokenizer


class WordTokenizer(Tokenizer):
    """A token a word, a vocabulary of its own, and two tokens before every prompt."""

    def __init__(self) -> None:
        self._words = [f" {chr(97 + index // 26)}{chr(97 + index % 26)}q" for index in range(300)]
        self.vocab_size, self.special_tokens, self.eos_token_id, self.chat_template = 300, {}, None, None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * (len(text.split()) + 2 * add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id].encode()


def test_words_are_of_four_letters() -> None:
    assert {len(word) for word in WORDS} == {4}
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), WordTokenizer()], ids=["bytes", "words"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_exactly_so_many_tokens(tokenizer: Tokenizer, add_special_tokens: bool) -> None:
    make = TokenizerPrompts(tokenizer, add_special_tokens=add_special_tokens)
    for num_tokens in (3, 4, 5, 7, 16, 100, 333, 2000):
        text = make(num_tokens, random_stream(0, "prompt", num_tokens))
        assert len(tokenizer.encode(text, add_special_tokens=add_special_tokens)) == num_tokens


def test_there_is_always_a_prompt() -> None:
    assert TokenizerPrompts(WordTokenizer(), add_special_tokens=True)(1, random_stream(0))
    assert WordPrompts(30.0, 1.0)(1, random_stream(0))


def test_words_come_from_the_vocabulary() -> None:
    make = TokenizerPrompts(WordTokenizer(), add_special_tokens=False)
    assert all(word.endswith("q") for word in make(50, random_stream(0)).split())


def test_word_cost_of_a_server() -> None:
    """A server with bytes for tokens and a template of 9: n words are 5n - 1 bytes."""
    cost = fit_word_prompts((64, 192), (64 * 5 - 1 + 9, 192 * 5 - 1 + 9))
    assert cost == WordPrompts(8.0, 5.0)
    without_template = structs.replace(cost, fixed=0.0)(100, random_stream(0))
    assert len(without_template.split()) == 20
    with_it = cost(108, random_stream(0))
    assert len(with_it) + 9 == 108


def test_a_server_that_counts_nonsense() -> None:
    with pytest.raises(UsageError, match="give --tokenizer"):
        fit_word_prompts((64, 192), (10, 10))


def test_equal_streams_make_equal_prompts() -> None:
    assert word_text(20, random_stream(1, "x")) == word_text(20, random_stream(1, "x"))
    assert word_text(20, random_stream(1, "x")) != word_text(20, random_stream(2, "x"))


def test_prefixes() -> None:
    make = TokenizerPrompts(WordTokenizer(), add_special_tokens=False)
    prefixes = SharedPrefixes(make, num_tokens=30, num_prefixes=3, seed=5)
    texts = [prefixes.before(f"tail{index}").split() for index in range(60)]
    assert {len(text) for text in texts} == {31}
    assert [text[-1] for text in texts] == [f"tail{index}" for index in range(60)]
    assert len({tuple(text[:-1]) for text in texts}) == 3
