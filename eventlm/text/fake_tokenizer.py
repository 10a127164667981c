"""The tokenizer of `--model fake`: bytes in, words out.

Ids 0 to 255 are bytes, then come the special tokens, and every id from there on stands for a word or a part of a
character. The fake worker draws ids at random, so its text mixes words with characters that arrive in pieces.
"""

from __future__ import annotations

import re

from eventlm.text.chat_template import ChatTemplate
from eventlm.text.tokenizer import Tokenizer
from eventlm.worker.grammar.vocabulary import FAKE_SPECIAL_TOKENS

_NUM_BYTES = 256
_SPECIAL_TOKENS = FAKE_SPECIAL_TOKENS
_SPECIAL_IDS = {token: _NUM_BYTES + index for index, token in enumerate(_SPECIAL_TOKENS)}
_FIRST_PIECE = _NUM_BYTES + len(_SPECIAL_TOKENS)
_ROCKET = "🚀".encode()

#: What the ids after the special tokens stand for, over and over.
_PIECES = tuple(
    piece if isinstance(piece, bytes) else piece.encode()
    for piece in (
        " the", " of", " and", " to", " in", " engine", " event", " log", " token", " block", " step", " rewinds",
        " replays", ",", ".", "\n", " été", " naïve", " größer", " Ω", " привет", " 日本", "語", " 한국", " שלום",
        " 🙂",
        _ROCKET[:1], _ROCKET[1:3], _ROCKET[3:], "é".encode()[:1], "é".encode()[1:],
    )
)  # fmt: skip

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


class FakeTokenizer(Tokenizer):
    """Bytes, four special tokens, and a piece of text for any other id."""

    grammar_vocab_size = _FIRST_PIECE

    def __init__(self, vocab_size: int = 1024) -> None:
        self.vocab_size = vocab_size
        self.special_tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        self.special_bytes = {token_id: token.encode() for token, token_id in _SPECIAL_IDS.items()}
        self.eos_token_id = _SPECIAL_IDS["<|eos|>"]
        self.chat_template = ChatTemplate(_CHAT_TEMPLATE, self.special_tokens)
        self._special = re.compile("(" + "|".join(map(re.escape, _SPECIAL_TOKENS)) + ")")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids = [_SPECIAL_IDS["<|bos|>"]] if add_special_tokens else []
        for part in self._special.split(text):
            if part in _SPECIAL_IDS:
                token_ids.append(_SPECIAL_IDS[part])
            else:
                token_ids += part.encode()
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < _NUM_BYTES:
            return bytes([token_id])
        if token_id < _FIRST_PIECE:
            return b""
        return _PIECES[(token_id - _FIRST_PIECE) % len(_PIECES)]
