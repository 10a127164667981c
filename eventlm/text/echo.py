"""A prompt as `echo` shows it before its completion: its text, and where in the text its tokens are."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from eventlm.text.detokenizer import Detokenizer
from eventlm.text.tokenizer import Tokenizer


class Echo(Struct, frozen=True):
    """A prompt, or consecutive tokens of one.

    text_offset: characters of the whole prompt's text before each token. Where tokens share a character, it belongs to
    the last of them.
    """

    text: str
    token_ids: list[int]
    text_offset: list[int]

    def part(self, start: int, end: int) -> Echo:
        """The tokens from `start` to `end` with their text. The texts of consecutive parts join to the whole."""
        bounds = [*self.text_offset, len(self.text)]
        return Echo(self.text[bounds[start] : bounds[end]], self.token_ids[start:end], self.text_offset[start:end])


def echo_of_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Echo:
    """A prompt given as tokens: all are shown, special ones by their names."""
    detokenizer = Detokenizer(tokenizer.raw_token_bytes)
    pieces: list[str] = []
    text_offset: list[int] = []
    num_characters = 0
    for token_id in token_ids:
        text_offset.append(num_characters)
        pieces.append(detokenizer.push([token_id]))
        num_characters += len(pieces[-1])
    pieces.append(detokenizer.flush())
    return Echo("".join(pieces), list(token_ids), text_offset)


def echo_of_text(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> Echo:
    """A prompt given as text, unchanged. Tokens that the tokenizer added around it have no text.

    Offsets are exact if the tokens spell the text, perhaps after a space that the tokenizer added. With a tokenizer
    that rewrites texts (normal forms, lower case) they refer to the rewritten text, cut at the end.
    """
    inner = echo_of_tokens(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    num_before = _num_before(inner.token_ids, token_ids)
    num_after = len(token_ids) - num_before - len(inner.token_ids)
    shift = len(inner.text) - len(text) if inner.text.endswith(text) else 0
    text_offset = [min(max(offset - shift, 0), len(text)) for offset in inner.text_offset]
    return Echo(text, list(token_ids), [0] * num_before + text_offset + [len(text)] * num_after)


def _num_before(inner: Sequence[int], outer: Sequence[int]) -> int:
    """How many tokens of `outer` are before `inner`."""
    return next(start for start in range(len(outer) + 1) if outer[start : start + len(inner)] == inner)
