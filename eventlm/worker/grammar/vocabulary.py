"""The vocabularies that grammars are matched against: a checkpoint's, and the fake model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.grammars import make_tokenizer

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer

#: The fake model's tokens: the bytes, these, and pieces of text that no grammar is given.
NUM_BYTES = 256
FAKE_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")


def checkpoint_vocabulary(folder: str, vocab_size: int) -> LLTokenizer:
    """That of the tokenizer in `folder`, of a model that has `vocab_size` ids: those without a token match nothing."""
    from eventlm.models.checkpoint.tokenizer_files import read_tokenizer

    files = read_tokenizer(Path(folder))
    tokens = files.token_bytes()[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    special = {token_id: token for token_id, token in files.special_bytes().items() if token_id < vocab_size}
    return make_tokenizer(tokens, special, _Tokenization(files.backend, tokens))


class _Tokenization:
    """The checkpoint's own tokens of a text; the longest that fit where those stand for anything else.

    A tokenizer may put a space before a text, or take the name of a special token for the token itself.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Sequence[bytes]) -> None:
        self._backend = backend
        self._tokens = tokens
        self._ids = {token: token_id for token_id, token in reversed(list(enumerate(tokens))) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        token_ids: list[int] = self._backend.encode(text.decode(), add_special_tokens=False).ids
        known = all(token_id < len(self._tokens) for token_id in token_ids)
        if known and b"".join(self._tokens[token_id] for token_id in token_ids) == text:
            return token_ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token_id := self._ids.get(text[start:end])) is not None:
                    found.append(token_id)
                    start = end
                    break
            else:
                # A byte that the model has no token for.
                break
        return found


def fake_vocabulary() -> LLTokenizer:
    """Bytes and special tokens."""
    special = {NUM_BYTES + index: token.encode() for index, token in enumerate(FAKE_SPECIAL_TOKENS)}
    return make_tokenizer([bytes([byte]) for byte in range(NUM_BYTES)] + [b""] * len(special), special)
