"""Encodes prompts without stalling the loop: short texts at once, long ones in a thread.

A body may have thousands of short texts, so the loop turns whenever they add up to a long one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eventlm.errors import InputError
from eventlm.text.echo import Echo, echo_of_text, echo_of_tokens
from eventlm.text.tokenizer import Tokenizer

#: Texts up to this many characters take well under a millisecond.
INLINE_CHARACTERS = 2048
#: The cost of any message or text, beside its length, in characters.
CHARACTERS_OF_A_MESSAGE = 64

T = TypeVar("T")


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the start of a text and, if they differ, after a space.

    Raises InputError for a word of spaces alone.
    """
    found: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not plain:
            param = f"bad_words[{index}]"
            raise InputError(param, f"Invalid value for '{param}': it has nothing but spaces.")
        found.append(plain)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(found)


class PromptEncoder:
    """Encodes prompts, at most two long ones at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        #: Encoded since the loop last turned.
        self._inline_characters = 0

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        return await self.run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def echo(self, prompt: str | None, token_ids: list[int]) -> Echo:
        """A prompt to be echoed: the text as it came, or the text of its tokens."""
        if prompt is None:
            # A token has a few characters.
            return await self.run(4 * len(token_ids), lambda: echo_of_tokens(self._tokenizer, token_ids))
        return await self.run(len(prompt), lambda: echo_of_text(self._tokenizer, prompt, token_ids))

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not occur so that the words do not."""
        return await self.run(sum(map(len, words)), lambda: bad_words_token_ids(self._tokenizer, words))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of whole prompts or outputs, special tokens included."""
        return await self.run(len(token_ids), lambda: self._tokenizer.decode(token_ids))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return await self.run(len(token_ids), lambda: self._tokenizer.token_strings(token_ids))

    def close(self) -> None:
        """Release the threads and drop the texts that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do work that costs as much as a text of `size` characters, in a thread if that is long."""
        if size <= INLINE_CHARACTERS:
            self._inline_characters += max(size, CHARACTERS_OF_A_MESSAGE)
            if self._inline_characters > INLINE_CHARACTERS:
                self._inline_characters = 0
                await asyncio.sleep(0)
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
