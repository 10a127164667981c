"""The fake tokenizer handles any text and any id."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eventlm.text.detokenizer import Detokenizer
from eventlm.text.fake_tokenizer import FakeTokenizer

TOKENIZER = FakeTokenizer()


@given(text=st.text())
def test_a_text_comes_back(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert max(token_ids, default=0) < TOKENIZER.vocab_size
    detokenizer = Detokenizer(TOKENIZER.token_bytes)
    assert detokenizer.push(token_ids) + detokenizer.flush() == text


@given(token_ids=st.lists(st.integers(0, 2**31)))
def test_any_id_has_text(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER.token_bytes)
    text = detokenizer.push(token_ids) + detokenizer.flush()
    assert text.encode().decode() == text


def test_chat_uses_special_tokens() -> None:
    assert TOKENIZER.chat_template is not None
    text = TOKENIZER.chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert [token_id for token_id in token_ids if token_id >= 256] == [258, 259, 258]
    assert TOKENIZER.encode("a", add_special_tokens=True) == [256, 97]
    assert TOKENIZER.token_bytes(TOKENIZER.eos_token_id) == b""
