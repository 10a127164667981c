"""The tokenizer of models that other servers run, where theirs is not known."""

from __future__ import annotations

from eventlm.text.tokenizer import Tokenizer

#: About as long as tokens are.
BYTES_OF_A_PIECE = 4
#: A prime below 2**31, since ids are 31 bits.
_VOCAB_SIZE = 2**31 - 1


class PieceTokenizer(Tokenizer):
    """Cuts texts into pieces of four bytes, each of which has an id, so that equal beginnings of texts have equal ids.

    The ids only serve to count and to compare: there is no way back to the text.
    """

    vocab_size = _VOCAB_SIZE
    eos_token_id = None
    chat_template = None

    def __init__(self) -> None:
        self.special_tokens = {}
        self.special_bytes = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        data = text.encode()
        padded = data.ljust(len(data) + -len(data) % BYTES_OF_A_PIECE, b"\0")
        return [
            int.from_bytes(padded[start : start + BYTES_OF_A_PIECE], "little") % _VOCAB_SIZE
            for start in range(0, len(padded), BYTES_OF_A_PIECE)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        return b""
