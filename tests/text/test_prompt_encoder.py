"""A large prompt does not stall the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.prompt_encoder import INLINE_CHARACTERS, PromptEncoder, bad_words_token_ids
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.server.checkpoints import CORPUS, byte_level


@pytest.mark.parametrize("repeats", [1, 1000])
async def test_encode(repeats: int) -> None:
    encoder = PromptEncoder(FakeTokenizer())
    text = "naïve " * repeats
    assert bytes(await encoder.encode(text, add_special_tokens=False)).decode() == text
    encoder.close()


async def test_the_loop_runs_on_while_a_large_prompt_is_encoded(tmp_path: Path) -> None:
    encoder = PromptEncoder(CheckpointTokenizer(byte_level(tmp_path)))
    text = "".join(CORPUS) * 40
    assert len(text) > 50 * INLINE_CHARACTERS
    encoding = asyncio.create_task(encoder.encode(text, add_special_tokens=False))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    encoder.close()
    assert len(encoding.result()) > 50_000
    assert num_turns > 5


async def test_the_loop_runs_on_while_many_prompts_are_encoded() -> None:
    encoder = PromptEncoder(FakeTokenizer())
    num_texts = 200
    texts = ["x" * (INLINE_CHARACTERS // 4)] * num_texts

    async def encode_all() -> int:
        return sum([len(await encoder.encode(text, add_special_tokens=False)) for text in texts])

    encoding = asyncio.create_task(encode_all())
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    encoder.close()
    assert encoding.result() == sum(map(len, texts))
    assert num_turns >= num_texts // 5


def test_bad_words_with_and_without_a_space(tmp_path: Path) -> None:
    tokenizer = CheckpointTokenizer(byte_level(tmp_path))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    # One token behind a space, several at the start of a text.
    assert len(encode(" quick")) < len(encode("quick"))
    assert bad_words_token_ids(tokenizer, ["quick"]) == (encode("quick"), encode(" quick"))
    assert bad_words_token_ids(tokenizer, [" x"]) == (encode("x"), encode(" x"))
    # Whatever follows a space of its own is found without it.
    assert encode(" 語")[1:] == encode("語")
    assert bad_words_token_ids(tokenizer, ["語"]) == (encode("語"),)
    assert bad_words_token_ids(FakeTokenizer(), ["the", "a"]) == (tuple(b"the"), tuple(b"a"))
